"use strict";
// The server sends the page's contents again whenever the run folder has changed.
const source = new EventSource("follow");
source.addEventListener("message", (event) => {
  document.querySelector("main").innerHTML = JSON.parse(event.data);
});
source.addEventListener("error", () => {
  const state = document.querySelector(".state");
  if (state !== null && source.readyState !== EventSource.OPEN) {
    state.textContent = "disconnected: `lockstep watch` has ended, or its machine cannot be reached";
    state.className = "state unknown";
  }
});
