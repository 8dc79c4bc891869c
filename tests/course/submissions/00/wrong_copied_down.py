# expects: check=00.environment:python misconception=-
def environment():
    return {"python": (2, 7), "torch": "0.1"}
