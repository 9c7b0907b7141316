// The first hour of a new user, with a clock, by mouse and the key R: the first demo video, the first real model that is
// refused, the first folder of a published name that runs, with small random weights. Prints clicks and seconds.
import assert from "node:assert/strict";
import { mkdir, readFile, readdir, cp, rename, rm, truncate, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { openPage } from "./comfy.mjs";
import { notice } from "./notices.mjs";
import { chosenModes, report } from "./reporting.mjs";
import { ended, listen, scrolledTo } from "./running.mjs";
import { shoot } from "./tidy.mjs";

const TEMPLATE = "anygpu_ltx_text_to_video";
const MODELS = join(process.env.COMFYUI_BASE, "models", "diffusers");

/** The largest weights in a folder, whose end an interrupted download lacks. */
async function largest(folder) {
  const files = (await readdir(folder, { recursive: true })).filter((name) => name.endsWith(".safetensors"));
  const sizes = await Promise.all(files.map(async (name) => [(await readFile(join(folder, name))).length, join(folder, name)]));
  return sizes.sort(([one], [two]) => two - one)[0];
}

async function firstHour(nodes2) {
  const away = `${MODELS}.away`;
  await rename(MODELS, away);
  await mkdir(MODELS);
  const { browser, page } = await openPage({ nodes2 });
  let clicks = 0;
  const click = async (what) => {
    await what.click();
    clicks += 1;
  };
  const run = page.getByTestId("queue-button").first();
  const told = (what, started) => console.log(`--  ${nodes2 ? "Nodes 2.0" : "classic canvas"}: ${what}: ${clicks} clicks, ${((Date.now() - started) / 1000).toFixed(1)} s`);
  const videos = () => page.locator("video").evaluateAll((all) => all.filter(({ videoWidth }) => videoWidth).map(({ src, currentSrc }) => src || currentSrc));
  /** Press Run, and wait until a clip is shown that was not there. */
  const films = async () => {
    const before = await videos();
    await listen(page);
    await click(run);
    const seen = await ended(page, 500000);
    assert.equal(seen.ending, "execution_success", seen.message);
    while ((await videos()).every((src) => before.includes(src))) await page.waitForTimeout(100);
  };
  try {
    let started = Date.now();
    await click(page.getByRole("button", { name: "Templates" }).first());
    await click(page.getByText("anygpu", { exact: true }).first());
    await click(await scrolledTo(page, TEMPLATE));
    await page.waitForFunction(() => window.app.graph._nodes.some(({ type }) => type === "AnyGPUSample"));
    await films();
    told("first demo video", started);
    await shoot(page, nodes2, "hour_demo", "after");

    await cp(join(away, "LTX-Video"), join(MODELS, "LTX-Video"), { recursive: true, dereference: true });
    const [bytes, file] = await largest(join(MODELS, "LTX-Video"));
    const whole = await readFile(file);
    await truncate(file, bytes >> 1);
    [clicks, started] = [0, Date.now()];
    await page.keyboard.press("r");
    await listen(page);
    await click(run);
    assert.equal((await ended(page)).ending, "execution_error");
    console.log(`--  ${JSON.stringify(await notice(page))}`);
    told("first refused real model, cut short", started);
    await shoot(page, nodes2, "hour_refused", "after");

    await writeFile(file, whole);
    [clicks, started] = [0, Date.now()];
    await page.keyboard.press("r");
    await films();
    told("first model of a published name", started);
    await shoot(page, nodes2, "hour_real", "after");
    assert.equal(await page.getByText("No model yet").filter({ visible: true }).count(), 0, "it still says that there is no model");
    assert.equal(await page.getByRole("button", { name: "Download LTX-Video" }).filter({ visible: true }).count(), 0, "it still offers the model that ran");
  } finally {
    await browser.close();
    await rm(MODELS, { recursive: true });
    await rename(away, MODELS);
  }
}

for (const nodes2 of chosenModes()) await report(nodes2)("the first hour", () => firstHour(nodes2));
