"""How long a run will take: its work counted, at the rates of this device, corrected by earlier runs."""
