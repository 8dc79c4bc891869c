# expects: check=00.environment:python misconception=no_dict
def environment():
    report = {"python": (3, 11), "torch": "2.13.0"}
    print(report)
