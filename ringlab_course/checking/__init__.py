"""The contracts of exercises, and the functions that several exercises share to check an answer."""
