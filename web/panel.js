// The side bar tab. Nothing is fetched before it is opened: its code, its style and every request come after that.
import { app } from "../../scripts/app.js";

app.registerExtension({
  name: "anygpu.panel",
  setup() {
    let close = null;
    app.extensionManager.registerSidebarTab({
      id: "anygpu",
      icon: "pi pi-microchip",
      title: "AnyGPU",
      tooltip: "AnyGPU: what it decided for this machine, what a run will need, what the last one did",
      type: "custom",
      render: async (element) => {
        const { open } = await import("./panel.mjs");
        close?.();
        close = open(element);
      },
      destroy: () => {
        close?.();
        close = null;
      },
    });
  },
});
