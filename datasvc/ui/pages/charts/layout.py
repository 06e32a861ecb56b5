"""The size of the charts of pages: a column of the page, whose width the style sheet gives to all of them."""

from typing import Final

# As wide as the narrowest column that fits a page of 1280 pixels twice. In a window of 400 pixels the text of such a
# chart has more than 10 pixels, and in the widest column it is as large as that of the page.
CHART_WIDTH: Final = 440
