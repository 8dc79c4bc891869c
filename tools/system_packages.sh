#!/bin/sh
# Install the Debian packages that some tests need, or say loudly how to install them if this user may not.
set -eu
missing=""
command -v bwrap >/dev/null 2>&1 || missing="bubblewrap"
command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 ||
    command -v google-chrome >/dev/null 2>&1 || missing="${missing:+$missing }chromium fonts-dejavu-core"
[ -n "$missing" ] || exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    printf '%s\n' "ringlab: installing $missing" >&2
    # shellcheck disable=SC2086 # a list of names
    if apt-get update -qq >&2 &&
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >&2; then
        exit 0
    fi
fi
if [ "${RINGLAB_REQUIRE_ALL:-}" = 1 ]; then
    printf '%s\n' "ringlab: needed: $missing; remedy: sudo apt-get update && sudo apt-get install -y $missing" >&2
    exit 1
fi
case "$(uname -s)" in
    Linux) remedy="sudo apt-get update && sudo apt-get install -y $missing   (or your distribution's packages of these names)" ;;
    *) remedy="run them on Linux: the sandboxed judge needs bubblewrap" ;;
esac
printf '\n%s\n\n' "*** ringlab: NOT INSTALLED: $missing. The tests that need them will be SKIPPED. Remedy: $remedy ***" >&2
