// What only scripts change is in the address too, such as the range of a zoomed curve: a link shows the same again.
"use strict";

const address = {
  // The values of a parameter.
  read: (name) => new URL(window.location.href).searchParams.getAll(name),

  // Replaces the values of a parameter, without a new entry in the history.
  write(name, values) {
    const url = new URL(window.location.href);
    url.searchParams.delete(name);
    values.forEach((value) => url.searchParams.append(name, value));
    if (url.href !== window.location.href) window.history.replaceState(window.history.state, "", url);
  },
};
