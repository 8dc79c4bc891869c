"""The bug clinic: wrong rings as patients, the instruments that examine them, and their sources when the chart holds."""
