// Writes the screenshots of the help pages, web/docs/<NodeId>/*.png, on the simulated accelerator; help_pictures.py,
// which drive.py calls afterwards, makes small WebP of them and draws the others.
import { fileURLToPath } from "node:url";
import { URL_OF_SERVER, openPage, showAll } from "./comfy.mjs";
import { ended, graphOf, queue } from "./running.mjs";

const HELP = new URL("../../web/docs/", import.meta.url);
const CARD = 64e6; // bytes of a card that holds some modes of the small test model and not others
const SMALL = { width: 256, height: 160, frames: 25, text: "a red fox walks through fresh snow", negative: "blurry" };

const { browser, page, errors } = await openPage({ width: 1500, height: 1100 });
const path = (name) => fileURLToPath(new URL(name, HELP));

/** The part of the page that shows the node of a type, with its edge. */
async function shot(type, name) {
  await page.waitForTimeout(1500);
  const clip = await page.evaluate((kind) => {
    const { canvas, ds } = window.app.canvas;
    const [x, y, width, height] = window.app.graph._nodes.find((node) => node.type === kind).boundingRect;
    const { left, top } = canvas.getBoundingClientRect();
    const edge = 12;
    return {
      x: left + (x + ds.offset[0]) * ds.scale - edge,
      y: top + (y + ds.offset[1]) * ds.scale - edge,
      width: width * ds.scale + 2 * edge,
      height: height * ds.scale + 2 * edge,
    };
  }, type);
  await page.screenshot({ path: path(name), clip });
}

async function ran() {
  await queue(page);
  const seen = await ended(page, 240000);
  if (seen.ending !== "execution_success") throw new Error(seen.message);
}

/** The picture that a node put out, as it is; of its upper part alone where `height` is given. */
async function output(type, name, height = 0) {
  const url = await page.evaluate((kind) => {
    const { id } = window.app.graph._nodes.find((node) => node.type === kind);
    const [image] = window.app.nodeOutputs[id].images;
    return window.app.api.apiURL(`/view?${new URLSearchParams(image)}`);
  }, type);
  const viewer = await browser.newPage();
  await viewer.goto(new URL(url, URL_OF_SERVER).href);
  const picture = viewer.locator("img");
  const { width, height: whole } = await picture.evaluate(({ naturalWidth, naturalHeight }) => ({ width: naturalWidth, height: naturalHeight }));
  await viewer.setViewportSize({ width, height: whole });
  await viewer.screenshot({ path: path(name), clip: { x: 0, y: 0, width, height: height || whole } });
  await viewer.close();
}

async function simulated(bytes) {
  const body = JSON.stringify({ bytes });
  await fetch(`${URL_OF_SERVER}/simulated/limit`, { method: "POST", headers: { "Content-Type": "application/json" }, body });
}

const load = ["AnyGPULoadPipeline", { model: "LTX-Video" }];
const text = { text: SMALL.text, negative: SMALL.negative };
try {
  await simulated(CARD);
  await graphOf(page, [load, ["AnyGPUMemoryPlan", { ...SMALL, frames: 49 }, { pipeline: [0, "pipeline"] }]]);
  await ran();
  await output("AnyGPUMemoryPlan", "AnyGPUMemoryPlan/bars.png");
  await page.evaluate(() => {
    const node = window.app.graph._nodes.find(({ type }) => type === "AnyGPULoadPipeline");
    node.setSize([460, node.computeSize()[1] + 130]);
    window.app.graph.remove(window.app.graph._nodes.find(({ type }) => type === "AnyGPUMemoryPlan"));
  });
  await showAll(page);
  await shot("AnyGPULoadPipeline", "AnyGPULoadPipeline/node.png");

  await graphOf(page, [["AnyGPUHardwareReport", { check: true }]]);
  await ran();
  await output("AnyGPUHardwareReport", "AnyGPUHardwareReport/table.png", 760);

  await graphOf(page, [
    load,
    ["AnyGPUEncodePrompt", text, { pipeline: [0, "pipeline"] }],
    ["AnyGPUSample", { ...SMALL, steps: 200, seed: 1 }, { pipeline: [0, "pipeline"], prompt: [1, "prompt"] }],
    ["AnyGPUDecode", {}, { pipeline: [0, "pipeline"], latent: [2, "latent"] }],
    ["SaveVideo", {}, { video: [3, "video"] }],
  ]);
  await showAll(page);
  await queue(page);
  await page.waitForFunction(() => window.seen.progress.some(([value, max]) => max === 200 && value >= 60), null, { timeout: 240000 });
  await shot("AnyGPUSample", "AnyGPUSample/running.png");
  await ended(page, 240000);

  await page.locator("[aria-label^='AnyGPU: ']").click();
  const kept = page.locator(".anygpu-panel details").filter({ has: page.getByRole("heading", { name: "Saved latents" }) });
  await kept.evaluate((part) => (part.open = true)); // it is folded at first
  await kept.getByRole("button", { name: "Recover" }).first().waitFor();
  await kept.scrollIntoViewIfNeeded();
  await page.waitForTimeout(1500);
  const { x, y, width } = await kept.boundingBox();
  await page.screenshot({ path: path("AnyGPURecoverLatents/tab.png"), clip: { x, y, width, height: 330 } });
  if (errors.length) throw new Error(errors.join("\n"));
} finally {
  await simulated(null);
  await browser.close();
}
