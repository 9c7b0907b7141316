// What every test script here shares: the modes it runs in, how checks are told, and the README's screenshots.
import { mkdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";
import { graphBottom } from "./comfy.mjs";

const IMAGES = new URL("../../docs/images/", import.meta.url);
const PICTURES = process.argv.includes("--pictures");

/** Whether Nodes 2.0 is on, for each mode: both, or the one that `--classic` or `--nodes2` names. */
export function chosenModes() {
  if (process.argv.includes("--classic")) return [false];
  return process.argv.includes("--nodes2") ? [true] : [false, true];
}

/** Runs a check and says how long it took; `shot(page)` takes screenshots in the classic canvas when they are wanted. */
export function report(nodes2) {
  const mode = nodes2 ? "Nodes 2.0" : "classic canvas";
  const check = async (title, act) => {
    const started = Date.now();
    await act();
    console.log(`ok  ${mode}: ${title} (${((Date.now() - started) / 1000).toFixed(1)} s)`);
  };
  check.shot = (page) => (PICTURES && !nodes2 ? (name) => picture(page, name, { quiet: false, height: 900 }) : null);
  return check;
}

/**
 * A screenshot for the README, when they are wanted.
 * `quiet` waits until the notices at the right edge are gone; `height` of the page in pixels, down to the lowest node
 * where it is not given.
 */
export async function picture(page, name, { quiet = true, height = 0 } = {}) {
  if (!PICTURES || !name) return;
  await mkdir(IMAGES, { recursive: true });
  if (quiet) await page.waitForTimeout(6000);
  const { width, height: whole } = page.viewportSize();
  const shown = height || Math.min(whole, Math.ceil(await graphBottom(page)) + 50);
  await page.screenshot({ path: fileURLToPath(new URL(name, IMAGES)), clip: { x: 0, y: 0, width, height: shown } });
}
