// Folds advanced inputs of our nodes in the classic canvas, as Nodes 2.0 does, but for linked and changed widgets.
import { app } from "../../scripts/app.js";

const ALWAYS = "Comfy.Node.AlwaysShowAdvancedWidgets";
const NAME = "anygpu_advanced"; // of the button, which is neither saved nor sent

const linked = (node, widget) => node.inputs?.some((input) => input.widget?.name === widget.name && input.link != null);

/** Fold what has its usual value, or show all. In the newest frontends Nodes 2.0 never shows what is hidden here. */
function update(node, usual) {
  const open = node.showAdvanced || app.extensionManager.setting.get(ALWAYS);
  for (const [widget, value] of usual) {
    const folded = !open && widget.value === value && !linked(node, widget);
    const newest = "visibility" in widget;
    if (newest) widget.advanced = folded; // counts for the height of the node
    widget.hidden = folded && !(newest && window.LiteGraph.vueNodesMode);
  }
}

function fold(node) {
  const usual = new Map((node.widgets ?? []).filter(({ options }) => options?.advanced).map((widget) => [widget, widget.value]));
  if (!usual.size) return;
  node.anygpuFold = () => update(node, usual);
  /** Let the node be as tall as what it shows, and keep what it has beyond that. */
  const toggle = () => {
    const spare = Math.max(0, node.size[1] - node.computeSize()[1]);
    node.showAdvanced = !node.showAdvanced;
    node.anygpuFold();
    node.setSize([node.size[0], node.computeSize()[1] + spare]);
    app.canvas?.setDirty(true, true);
  };
  const button = node.addWidget("button", NAME, "", toggle, { serialize: false, canvasOnly: true });
  button.serialize = false;
  Object.defineProperty(button, "label", { get: () => `${node.showAdvanced ? "Hide" : "Show"} advanced inputs`, set() {} });
  for (const event of ["onConfigure", "onConnectionsChange", "onWidgetChanged"]) {
    const before = node[event];
    node[event] = function (...given) {
      before?.apply(this, given);
      node.anygpuFold();
    };
  }
  node.anygpuFold();
  node.setSize([node.size[0], node.computeSize()[1]]);
}

/** Sizes below the first step are meant as that step: ComfyUI would round them to 0, which takes the default. */
function keepSmall(node) {
  for (const widget of node.widgets ?? []) {
    const { step2: step = 1, min } = widget.options ?? {};
    if (typeof widget.value !== "number" || min !== 0 || step <= 1) continue;
    const rounded = widget.callback;
    widget.callback = function (value, ...rest) {
      return rounded?.call(this, value > 0 && value < step ? step : value, ...rest);
    };
  }
}

app.registerExtension({
  name: "anygpu.advanced",
  setup() {
    const graphs = () => [app.graph, ...(app.graph?.subgraphs?.values() ?? [])];
    const again = () => graphs().forEach(({ _nodes }) => _nodes.forEach((node) => node.anygpuFold?.()));
    app.ui.settings.addEventListener("Comfy.VueNodes.Enabled.change", () => setTimeout(again));
  },
  nodeCreated(node) {
    if (!String(node.comfyClass ?? node.type).startsWith("AnyGPU")) return;
    keepSmall(node);
    fold(node);
  },
});
