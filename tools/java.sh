#!/usr/bin/env bash
# Print the home of a Java 17 to 21 runtime; install Debian's where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
. tools/lib.sh

# The major version of a java program: 17 for "17.0.15", 8 for "1.8.0_412"; nothing without one.
major() {
    "$1" -version 2>&1 | sed -n 's/.*version "\(1\.\)\{0,1\}\([0-9]*\).*/\2/p' | head -n 1
}

home_of() {
    local program
    program=$(readlink -f "$(command -v "$1")") || return 1
    dirname "$(dirname "$program")"
}

usable() {
    local version
    command -v "$1" >/dev/null || return 1
    version=$(major "$1")
    [ -n "$version" ] && [ "$version" -ge 17 ] && [ "$version" -le 21 ]
}

find_java() {
    local candidate
    for candidate in "${JAVA_HOME:-/nowhere}/bin/java" java /usr/lib/jvm/*/bin/java; do
        if usable "$candidate"; then
            home_of "$candidate"
            return
        fi
    done
    return 1
}

find_java && exit
# Debian 12 and Ubuntu have 17, Debian 13 has 21.
apt_install openjdk-17-jre-headless || apt_install openjdk-21-jre-headless || true
find_java && exit
fail "Spark needs a Java 17 (or 21) runtime, and none was found or could be installed" \
    "Debian, Ubuntu: sudo apt-get install openjdk-17-jre-headless" \
    "Fedora, RHEL:   sudo dnf install java-17-openjdk-headless" \
    "then call make again; one elsewhere is used when JAVA_HOME names it"
