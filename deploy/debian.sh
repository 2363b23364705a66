#!/usr/bin/env bash
# What a command of the Makefile needs of the machine, such as `deploy/debian.sh python java`: root gets the Debian
# packages that are missing, everybody else reads in one line how to.
set -euo pipefail

python=${PYTHON:-python3}
java=${JAVA_HOME:+$JAVA_HOME/bin/}java

packages_for() {
    case $1 in
        python)
            if ! command -v "$python" >/dev/null; then
                echo python3 python3-venv
            elif [ ! -x .venv/bin/python ] && ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
                echo python3-venv
            fi ;;
        java) "$java" -version 2>&1 | grep -Eq 'version "(1[7-9]|[2-9][0-9])' || echo default-jre-headless ;;
        maven) command -v "${MVN:-mvn}" >/dev/null || echo maven ;;
        chromium) command -v chromium chromium-browser google-chrome >/dev/null || echo chromium ;;
        postgresql)
            compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null ||
                echo postgresql ;;
        mariadb) command -v mariadbd /usr/sbin/mariadbd >/dev/null || echo mariadb-server-core mariadb-client-core ;;
        processes) command -v ps >/dev/null || echo procps ;;
        *) echo "no such requirement: $1" >&2; exit 2 ;;
    esac
}

missing=()
for need in "$@"; do
    packages=$(packages_for "$need")
    # shellcheck disable=SC2206 # one package a word
    [ -z "$packages" ] || missing+=($packages)
done

if [ "${#missing[@]}" -gt 0 ]; then
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "this machine lacks ${missing[*]}; Debian: sudo apt-get install ${missing[*]}" >&2
        exit 1
    fi
    echo "installing Debian packages: ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null >/dev/null
fi

for need in "$@"; do  # what no package of this Debian's helps with
    if [ "$need" = python ] && ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
        echo "dagster-unified needs Python 3.11 or newer, and $python is older: run make PYTHON=/path/to/python3.11" >&2
        exit 1
    fi
    if [ -n "$(packages_for "$need")" ]; then
        echo "$need is not there, or too old, though its Debian package is: see PATH and JAVA_HOME" >&2
        exit 1
    fi
done
