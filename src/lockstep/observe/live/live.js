"use strict";
// The server sends the page's contents anew whenever the run folder has changed.
const source = new EventSource("follow");
source.addEventListener("message", (event) => {
  document.querySelector("main").innerHTML = JSON.parse(event.data);
});
source.addEventListener("error", () => {
  const state = document.querySelector(".state");
  if (state !== null && source.readyState !== EventSource.OPEN) {
    state.textContent = "no longer connected: `lockstep watch` has ended, or its machine is out of reach";
    state.className = "state unknown";
  }
});
