"""What all pages share: access, errors, links, rendering, and the route of a page and of its JSON twin."""
