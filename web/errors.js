// Errors of our nodes as a notice that says what was found, what was expected and what to do, with a way to the node.
import { api } from "../../scripts/api.js";
import { app } from "../../scripts/app.js";

/** Whether an execution error is one of ours: our own kinds, or anything that one of our nodes raised. */
const ours = ({ exception_type: type = "", node_type: node = "" }) => type.startsWith("anygpu.") || node.startsWith("AnyGPU");

app.registerExtension({
  name: "anygpu.errors",
  setup() {
    api.addEventListener("execution_error", async ({ detail }) => {
      if (!detail || !ours(detail)) return;
      const { show } = await import("./errors.mjs");
      show(detail);
    });
    api.addEventListener("execution_start", async () => {
      if (document.querySelector(".anygpu-toast")) (await import("./errors.mjs")).dismiss();
    });
  },
});
