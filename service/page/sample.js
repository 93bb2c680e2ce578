// A drawing to try the page with, made here.

/** A PNG File: a red circle, a blue square and a yellow triangle in random order. */
export async function drawSample() {
  const canvas = document.createElement("canvas");
  canvas.width = 448;
  canvas.height = 224;
  const pen = canvas.getContext("2d");
  pen.fillStyle = "#f4f2ec";
  pen.fillRect(0, 0, canvas.width, canvas.height);
  const shapes = [circle, square, triangle].sort(() => Math.random() - 0.5);
  shapes.forEach((draw, index) => draw(pen, 88 + 136 * index, 112));
  const blob = await new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
  return new File([blob], "drawing.png", { type: "image/png" });
}

function circle(pen, x, y) {
  pen.fillStyle = "#d92b2b";
  pen.beginPath();
  pen.arc(x, y, 46, 0, 2 * Math.PI);
  pen.fill();
}

function square(pen, x, y) {
  pen.fillStyle = "#2356c9";
  pen.fillRect(x - 42, y - 42, 84, 84);
}

function triangle(pen, x, y) {
  pen.fillStyle = "#f0c419";
  pen.beginPath();
  pen.moveTo(x, y - 46);
  pen.lineTo(x + 50, y + 42);
  pen.lineTo(x - 50, y + 42);
  pen.fill();
}
