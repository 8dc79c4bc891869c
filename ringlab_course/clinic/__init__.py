"""The bug clinic: wrong rings as patients, and the instruments that examine them."""
