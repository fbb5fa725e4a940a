#!/usr/bin/env bash
# Stands in for docker and buildah: writes its words to $FAKE/calls, one call a line. Images exist
# as files in $FAKE/images; $FAKE/down says that nothing can be pulled or reached.
set -euo pipefail
printf '%s' "$(basename "$0")" >> "$FAKE/calls"
printf ' %q' "$@" >> "$FAKE/calls"
echo >> "$FAKE/calls"
image() { echo "$FAKE/images/${1//\//_}"; }
case $1 in
  info) [ ! -f "$FAKE/no-daemon" ] ;;
  inspect) [ -f "$(image "${*: -1}")" ] ;;
  pull) [ ! -f "$FAKE/down" ] && touch "$(image "${*: -1}")" ;;
  images) echo "12 MB" ;;
  push) [ ! -f "$FAKE/down" ] ;;
  build)
    [ ! -f "$FAKE/broken" ] || { echo "no space left" >&2; exit 125; }
    while [ "$1" != --tag ]; do shift; done
    touch "$(image "$2")"
    ;;
  *) exit 64 ;;
esac
