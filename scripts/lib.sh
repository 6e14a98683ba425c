# Shared by the scripts of this folder, which source it. Needs bash.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

say() { printf '\n== %s\n' "$*"; }

fail() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# Lines "package probe" of the purposes given.
packages_for() {
  local purpose package probe wanted
  while read -r purpose package probe; do
    for wanted in "$@"; do
      if [ "$purpose" = "$wanted" ]; then echo "$package $probe"; fi
    done
  done <"$root/scripts/packages"
}

debian_has() {
  [ "$(dpkg-query --show --showformat='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

# Whether what a package brings is there, however it came.
probe_finds() {
  case $1 in
    file:*) [ -e "${1#file:}" ] ;;
    command:*) command -v "${1#command:}" >/dev/null ;;
    header:*) echo "#include <${1#header:}>" | c++ -std=c++20 -E -x c++ - >/dev/null 2>&1 ;;
  esac
}

as_root() {
  if [ "$(id -u)" = 0 ]; then
    env DEBIAN_FRONTEND=noninteractive "$@"
  elif command -v sudo >/dev/null; then
    sudo env DEBIAN_FRONTEND=noninteractive "$@"
  else
    fail "cannot install $*: neither root nor sudo; install it and run this again"
  fi
}

# Installs the packages of the purposes given that are missing; touches nothing, and no network, when
# all are there. Where there is no apt-get it names what is missing and ends with 1.
ensure_packages() {
  local missing=() package probe debian=no
  if command -v apt-get >/dev/null && command -v dpkg-query >/dev/null; then debian=yes; fi
  while read -r package probe; do
    if [ $debian = yes ]; then
      debian_has "$package" || missing+=("$package")
    else
      probe_finds "$probe" || missing+=("$package (${probe#*:})")
    fi
  done < <(packages_for "$@" | sort -u)
  if [ ${#missing[@]} -eq 0 ]; then return; fi
  if [ $debian = no ]; then
    local list
    list=$(printf ', %s' "${missing[@]}")
    fail "missing: ${list:2}; install them (Debian's names are given) and run this again"
  fi
  say "installing ${missing[*]}"
  as_root apt-get update -qq || echo "package lists not refreshed; trying with those at hand" >&2
  as_root apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
    fail "apt-get could not install ${missing[*]}"
}

# Compilers to run at once: one a core, while each has 1.5 GB.
jobs_at_once() {
  local cores memory_mib=1000000
  cores=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
  if [ -r /proc/meminfo ]; then
    memory_mib=$(awk '/^MemAvailable:/ { print int($2 / 1024) }' /proc/meminfo)
  fi
  local by_memory=$((memory_mib / 1500))
  if [ "$by_memory" -lt 1 ]; then by_memory=1; fi
  echo $((cores < by_memory ? cores : by_memory))
}
