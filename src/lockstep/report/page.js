"use strict";
// The legend of the plot under the pointer shows, for each line, the value nearest to the pointer's step.
function showValuesAt(figure, clientX) {
  const plot = JSON.parse(figure.dataset.plot), [low, high, begin, end, width] = plot.axis;
  const box = figure.querySelector("svg").getBoundingClientRect();
  const x = (clientX - box.left) / box.width * width;
  const step = low + (x - begin) / (end - begin) * (high - low);
  const values = figure.querySelectorAll(".legend b");
  let at = null;
  plot.lines.forEach((points, index) => {
    const near = points.reduce((best, point) => Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
    values[index].textContent = near[1] + " at " + near[0];
    if (at === null || Math.abs(near[0] - step) < Math.abs(at - step)) at = near[0];
  });
  const cursor = figure.querySelector(".cursor"), place = begin + (at - low) / (high - low) * (end - begin);
  cursor.setAttribute("x1", place);
  cursor.setAttribute("x2", place);
  cursor.setAttribute("visibility", "visible");
}
function showLastValues(figure) {
  const values = figure.querySelectorAll(".legend b");
  JSON.parse(figure.dataset.plot).lines.forEach((points, index) => {
    values[index].textContent = points[points.length - 1][1];
  });
  figure.querySelector(".cursor").setAttribute("visibility", "hidden");
}
let hovered = null;
document.addEventListener("pointermove", (event) => {
  const figure = event.target instanceof Element ? event.target.closest("figure[data-plot]") : null;
  if (hovered !== null && hovered !== figure && hovered.isConnected) showLastValues(hovered);
  hovered = figure;
  if (figure !== null) showValuesAt(figure, event.clientX);
});
