// While no model is installed, the load node says so and which fits; its button copies what to download, and where to.
import { app } from "../../scripts/app.js";

const NODE = "AnyGPULoadPipeline";
const WIDGET = "anygpu_first_steps"; // not the name of an input: shown only, never saved or sent

app.registerExtension({
  name: "anygpu.first_run",
  async nodeCreated(node) {
    if ((node.comfyClass ?? node.type) !== NODE) return;
    const options = node.constructor.nodeData?.input?.required?.model?.[1];
    const text = options?.anygpu_first_run;
    if (!text || node.widgets?.some((widget) => widget.name === WIDGET)) return;
    const { copyButton, make, style } = await import("./elements.mjs");
    style();
    const shown = text.split("\n", 2).join("\n"); // all of it would be cut off: the tab has room
    const element = make("div", { class: "anygpu anygpu-first" }, make("p", {}, shown), copyButton(text, "Copy what to download"));
    node.addDOMWidget(WIDGET, "anygpu_text", element, { serialize: false, hideOnZoom: false, getMinHeight: () => 140 });
    node.setSize?.([Math.max(node.size[0], 380), Math.max(node.size[1], node.computeSize()[1])]); // a workflow may give it more
  },
});
