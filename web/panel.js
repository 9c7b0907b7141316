// The side bar tab. Its code, its style and all data are fetched only when it is opened.
import { app } from "../../scripts/app.js";

app.registerExtension({
  name: "anygpu.panel",
  setup() {
    let close = null;
    app.extensionManager.registerSidebarTab({
      id: "anygpu",
      icon: "pi pi-microchip",
      title: "AnyGPU",
      tooltip: "AnyGPU: choices for this machine, memory forecast, last run",
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
