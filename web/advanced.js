// Folds the advanced inputs of our nodes in the classic canvas, as Nodes 2.0 does by itself. A widget that is linked or
// has another value than its default stays visible. Order and values of the widgets are as before, so files are too.
import { app } from "../../scripts/app.js";

const ALWAYS = "Comfy.Node.AlwaysShowAdvancedWidgets";
const NAME = "anygpu_advanced"; // of the button, which is neither saved nor sent

/** Whether the input of a widget is linked. */
const linked = (node, widget) => node.inputs?.some((input) => input.widget?.name === widget.name && input.link != null);

/** Let the node be as tall as what it shows, and keep what it has beyond that. */
function refit(node, change) {
  const spare = Math.max(0, node.size[1] - node.computeSize()[1]);
  change();
  node.setSize([node.size[0], node.computeSize()[1] + spare]);
  app.canvas?.setDirty(true, true);
}

function fold(node) {
  const widgets = (node.widgets ?? []).filter((widget) => widget.options?.advanced);
  if (!widgets.length) return;
  for (const widget of widgets) {
    const usual = widget.value;
    const get = () => !node.showAdvanced && widget.value === usual && !linked(node, widget) && !app.extensionManager.setting.get(ALWAYS);
    Object.defineProperty(widget, "hidden", { configurable: true, enumerable: true, get, set() {} });
  }
  const button = node.addWidget("button", NAME, "", () => refit(node, () => (node.showAdvanced = !node.showAdvanced)), {
    serialize: false,
    canvasOnly: true,
  });
  button.serialize = false;
  Object.defineProperty(button, "label", { get: () => `${node.showAdvanced ? "Hide" : "Show"} advanced inputs`, set() {} });
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
  nodeCreated(node) {
    if (!String(node.comfyClass ?? node.type).startsWith("AnyGPU")) return;
    keepSmall(node);
    fold(node);
  },
});
