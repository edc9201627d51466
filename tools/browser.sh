#!/bin/sh
# Bring the browser in which the tests open pages: Debian's packages, as root. Elsewhere the tests
# leave it out and say so; with REQUIRE_BROWSER=1, as in CI, that is a failure.
here() { { command -v chromium || command -v google-chrome; } && command -v chromedriver; } >/dev/null
here && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
  echo 'Installing Chromium, for the tests that open pages in a browser.' >&2
  { apt-get update && apt-get install -y --no-install-recommends chromium chromium-driver; } >&2
  here && exit 0
fi
echo 'No Chromium with its driver here, and it could not be installed.' >&2
[ "${REQUIRE_BROWSER:-}" != 1 ]
