#!/usr/bin/env bash
# Print the path of a Chromium or Chrome; install Debian's where there is none. Only tests of how a
# page looks need one, so nothing is printed, and why is said, where there cannot be one.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/lib.sh

# Ubuntu has a program of this name that only says where to get one.
usable() {
    command -v "$1" >/dev/null && timeout 60 "$1" --version 2>/dev/null | grep -Eq '^(Chromium|Google Chrome) '
}

find_browser() {
    local candidate
    for candidate in "${CHROMIUM:-/nowhere}" chromium chromium-browser google-chrome google-chrome-stable; do
        if usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

on_debian() {
    grep -qsx 'ID=debian' /etc/os-release
}

find_browser && exit
! on_debian || apt_install chromium || true
find_browser && exit
say "no Chromium or Chrome was found or could be installed: tests that need one are left out" \
    "(Debian: sudo apt-get install chromium; one elsewhere is used when CHROMIUM names it)"
