// Makes a node of ours as tall as its text in the classic canvas, which cuts it off; Nodes 2.0 grows itself.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

const TEXT = "$$node-text-preview"; // core's widget for the text of a node
const SIDES = 52; // pixels beside the text: the widget's margins and core's padding
const [AROUND, MOST] = [36, 220]; // above and below it; core scrolls what is taller

/** The height in which core shows `text` in a node as wide as `width`. */
function heightOf(text, width) {
  const probe = document.createElement("div");
  Object.assign(probe.style, { position: "fixed", visibility: "hidden", font: "12px/16px Inter, Arial, sans-serif", whiteSpace: "pre-line", wordBreak: "break-all", width: `${width - SIDES}px` });
  probe.textContent = text.replace(/&#\d+;/g, "x"); // a sign that would be markup
  document.body.append(probe);
  const height = probe.offsetHeight;
  probe.remove();
  return Math.min(MOST, height + AROUND);
}

function fit(node, text) {
  const widget = node?.widgets?.find(({ name }) => name === TEXT);
  if (!widget || window.LiteGraph.vueNodesMode) return;
  const height = Math.max(widget.anygpuHeight ?? 0, heightOf(text, node.size[0]));
  if (height === widget.anygpuHeight) return;
  widget.anygpuHeight = height;
  widget.options.getMinHeight = () => height;
  node.setSize([node.size[0], Math.max(node.size[1], node.computeSize()[1])]);
  app.canvas?.setDirty(true, true);
}

app.registerExtension({
  name: "anygpu.status",
  setup() {
    api.addEventListener("progress_text", ({ detail }) => {
      const node = app.canvas?.graph?.getNodeById(Number(String(detail?.nodeId).split(":").at(-1)));
      if (String(node?.comfyClass ?? node?.type).startsWith("AnyGPU")) setTimeout(() => fit(node, detail.text)); // after core has put it there
    });
  },
});
