// Shows errors of our nodes as a notice: what was found, what was expected, what to do, and a button that goes to the node.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

/** Whether an execution error is ours: one of our error types, or anything raised by one of our nodes. */
const ours = ({ exception_type: type = "", node_type: node = "" }) => type.startsWith("anygpu.") || node.startsWith("AnyGPU");

app.registerExtension({
  name: "anygpu.errors",
  setup() {
    api.addEventListener("execution_error", async ({ detail }) => {
      if (!detail || !ours(detail)) return;
      const { show } = await import("./errors.mjs");
      await show(detail);
    });
    api.addEventListener("execution_start", async () => {
      if (document.querySelector(".anygpu-toast")) (await import("./errors.mjs")).dismiss();
    });
  },
});
