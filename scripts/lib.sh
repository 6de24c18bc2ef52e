# What scripts/test and scripts/demo share. Source it from bash, as the script itself, with `root` set.
#
#   use_venv   sets `python`: this checkout's own virtual environment, with the package and its extras; with arguments one
#              with that Spark (a minor version, or '') and that Python (likewise)
#   make_venv  the same, empty, by the name of its directory
#   use_java   a Java that Spark 4 runs on: JAVA_HOME, PATH, the system's packages, or an exact message
#   use_postgres   PostgreSQL's programs, of which the tests start a server: likewise
#   use_mariadb   MariaDB's programs: likewise; its service is not started
#   use_redis   Redis, of which the tests start a server: likewise
#   use_prometheus   Prometheus, for the picture of the dashboard: likewise
#   use_chromium   a browser, in which the tests look at the report: likewise
#   use_faketime   the library by which a soak steps the clock; without it the soak says so and goes on
#   take_minutes   LOOKUPCACHE_MINUTES and LOOKUPCACHE_SEED of a long run, from its arguments --minutes and --seed, else from the environment

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $1"
    printf '  %s\n' "${@:2}" >&2
    exit 1
}

take_minutes() {
    export LOOKUPCACHE_MINUTES="${LOOKUPCACHE_MINUTES:-30}" LOOKUPCACHE_SEED="${LOOKUPCACHE_SEED:-$RANDOM}"
    while [ "$#" -gt 0 ]; do
        [ "$#" -ge 2 ] || die "$1 needs a value" "e.g. '--minutes 5 --seed 7'"
        case $1 in
        --minutes) LOOKUPCACHE_MINUTES=$2 ;;
        --seed) LOOKUPCACHE_SEED=$2 ;;
        *) die "$1: not an argument" "there are --minutes and --seed" ;;
        esac
        shift 2
    done
    say "seed $LOOKUPCACHE_SEED"
}

# Whether the system's packages may be installed without asking anybody.
may_install() { [ "$(id -u)" = 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null; }

# Installs the first of the packages that can be; no stdin, so that it never waits for an answer.
install_one_of() {
    local package
    [ -n "${packages_updated:-}" ] || apt-get update -qq </dev/null >/dev/null ||
        say "apt-get update failed; going on with the known packages"
    packages_updated=1
    for package in "$@"; do
        say "Installing $package"
        if DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" </dev/null >/dev/null 2>&1; then
            return 0
        fi
    done
    return 1
}

# --- Python ----------------------------------------------------------------------------------------

# Prints the newest suitable python, or that of the version given. Debian ships one that cannot make environments,
# hence ensurepip.
find_python() {
    local name names=(python3.13 python3.12 python3.11 python3 python3.10)
    # pyenv puts only some of its versions on the PATH.
    [ -z "${1:-}" ] || names=("python$1" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$1".*/bin/"python$1")
    for name in "${names[@]}"; do
        if "$name" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' </dev/null >/dev/null 2>&1; then
            command -v "$name"
            return 0
        fi
    done
    return 1
}

# Prints the first of these versions of Python that is there, or the first of them.
newest_of() {
    local version
    for version in "$@"; do
        ! find_python "$version" >/dev/null || break
    done
    find_python "$version" >/dev/null && printf '%s\n' "$version" || printf '%s\n' "$1"
}

# Sets `python`: that of the virtual environment of this name in the checkout, which is made if it does not run; of the
# Python version given.
make_venv() {
    local base name=$1 version=${2:-}
    python="$root/$name/bin/python"
    if ! "$python" -c '' </dev/null >/dev/null 2>&1; then
        base=$(find_python "$version") || base=
        if [ -z "$base" ] && may_install; then
            install_one_of "python${version:-3}-venv" || true
            base=$(find_python "$version") || base=
        fi
        [ -n "$base" ] || die "no Python ${version:-3.10 or newer} with the venv module was found" \
            "install one: 'apt-get install python3-venv' (Debian, Ubuntu), 'dnf install python3.12' (Fedora, RHEL)" \
            "or 'brew install python@3.13' (macOS), then run this again"
        say "Making $name with $base"
        "$base" -m venv --clear "$root/$name" </dev/null || die "$base could not make $name" "see above"
    fi
}

use_venv() {
    local venv stamp name=.venv spark=${1:-} version=${2:-} more=()
    # Spark 3.5 does not know later Pythons.
    [ "$spark" != 3.5 ] || version=${version:-$(newest_of 3.12 3.11 3.10)}
    # PySpark's own extras hold NumPy below 2 there, and newer pyarrows want 2.
    [ "$spark" != 3.5 ] || more=('pyarrow<26' 'numpy<2')
    [ -z "$spark$version" ] || name=".venvs/spark-${spark:-newest}${version:+-python-$version}"
    venv="$root/$name" stamp="$root/$name/installed-from"
    make_venv "$name" "$version"
    # An editable install follows the sources, so only these files can make it outdated.
    if ! installed_from | cmp -s - "$stamp"; then
        say "Installing the package, Spark and the tools into $name (once, some minutes)"
        rm -f "$stamp"
        # With the extra, or pip builds each newer release of Spark before it takes this one.
        (cd "$root" && "$python" -m pip install -qq --disable-pip-version-check \
            -e '.[spark,cli,test,examples]' "pyspark[connect]${spark:+==$spark.*}" "${more[@]}" </dev/null) ||
            die "pip could not install the package, see above" "it needs PyPI, or a mirror of it in PIP_INDEX_URL" \
                "and a Spark for this Python: README.md says which fit"
        installed_from >"$stamp"
    fi
    # Spark looks for this Python by an unquoted shell command: with a space in its path it finds none of the
    # sources written in Python, without a word. So it gets a way around the space for as long as we run.
    if [[ $root == *[[:space:]]* ]]; then
        detour=$(mktemp -d)
        trap 'rm -rf "$detour"' EXIT
        ln -s "$venv" "$detour/venv"
        python="$detour/venv/bin/python"
    fi
    # Spark's workers run by this; the default is the first python3 on PATH.
    export PYSPARK_PYTHON="$python" PYSPARK_DRIVER_PYTHON="$python"
}

installed_from() {
    printf '%s\n' "$root"
    cat "$root/setup.cfg" "$root/pyproject.toml"
}

# --- Java ------------------------------------------------------------------------------------------

# Whether a java binary runs and is 17 or newer (8 calls itself 1.8).
java_is_new() {
    local major
    major=$("$1" -version 2>&1 </dev/null | sed -n 's/.*version "\([0-9]*\).*/\1/p' | head -n 1)
    [ "${major:-0}" -ge 17 ]
}

# Points JAVA_HOME at a suitable Java; unset, Spark takes the one on PATH. False if there is none.
find_java() {
    local home
    if [ -n "${JAVA_HOME:-}" ] && java_is_new "$JAVA_HOME/bin/java"; then
        return 0
    fi
    if java_is_new java; then
        unset JAVA_HOME
        return 0
    fi
    for home in /usr/lib/jvm/*; do
        if java_is_new "$home/bin/java"; then
            export JAVA_HOME="$home"
            return 0
        fi
    done
    return 1
}

use_java() {
    find_java && return
    if may_install; then
        say "No Java 17 or newer found"
        install_one_of openjdk-17-jre-headless openjdk-21-jre-headless default-jre-headless || true
        find_java && return
    fi
    die "Spark 4 needs Java 17 or newer, and none was found in JAVA_HOME, on PATH or in /usr/lib/jvm" \
        "install one: 'apt-get install openjdk-17-jre-headless' (Debian, Ubuntu), 'dnf install java-17-openjdk-headless'" \
        "(Fedora, RHEL) or 'brew install openjdk@17' (macOS; then export JAVA_HOME=\$(brew --prefix openjdk@17))"
}

# --- PostgreSQL ------------------------------------------------------------------------------------

# Whether there is a server to start, where tests/support/postgres.py looks for it.
find_chromium() { command -v chromium || command -v chromium-browser || command -v google-chrome; }

use_chromium() {
    find_chromium >/dev/null && return
    if may_install; then
        say "No Chromium found"
        install_one_of chromium || true
        find_chromium >/dev/null && return
    fi
    die "the tests look at the report in a browser, and no Chromium was found on PATH" \
        "install one: 'apt-get install chromium' (Debian, Ubuntu), 'dnf install chromium' (Fedora)" \
        "or put 'google-chrome' on PATH"
}

use_prometheus() {
    command -v prometheus >/dev/null && return
    if may_install; then
        say "No Prometheus found"
        install_one_of prometheus || true
        command -v prometheus >/dev/null && return
    fi
    die "the dashboard's queries are answered by Prometheus, and none was found on PATH" \
        "install one: 'apt-get install prometheus' (Debian, Ubuntu)"
}

find_postgres() { compgen -G '/usr/lib/postgresql/*/bin/postgres' >/dev/null || command -v postgres >/dev/null; }

use_postgres() {
    find_postgres && return
    if may_install; then
        say "No PostgreSQL found"
        install_one_of postgresql || true
        find_postgres && return
    fi
    die "the tests start a PostgreSQL server, and none was found in /usr/lib/postgresql or on PATH" \
        "install one: 'apt-get install postgresql' (Debian, Ubuntu), 'dnf install postgresql-server' (Fedora, RHEL)" \
        "or 'brew install postgresql@16' (macOS; then put \$(brew --prefix postgresql@16)/bin on PATH)"
}

# --- MariaDB ---------------------------------------------------------------------------------------

# Whether there is a server to start, where tests/support/mariadb.py looks for it.
find_mariadb() { PATH="$PATH:/usr/sbin" command -v mariadbd >/dev/null && PATH="$PATH:/usr/sbin" command -v mariadb-install-db >/dev/null; }

use_mariadb() {
    local policy=/usr/sbin/policy-rc.d
    find_mariadb && return
    if may_install; then
        say "No MariaDB found"
        # Debian starts a service when it installs one, unless this program forbids it.
        if [ ! -e "$policy" ]; then
            printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"
            install_one_of mariadb-server || true
            rm -f "$policy"
        else
            install_one_of mariadb-server || true
        fi
        find_mariadb && return
    fi
    die "the tests start a MariaDB server, and none was found on PATH or in /usr/sbin" \
        "install one: 'apt-get install mariadb-server' (Debian, Ubuntu), 'dnf install mariadb-server' (Fedora, RHEL)" \
        "or 'brew install mariadb' (macOS)"
}

# --- Redis ---------------------------------------------------------------------------------------

use_redis() {
    command -v redis-server >/dev/null && return
    if may_install; then
        say "No Redis found"
        install_one_of redis-server redis || true
        command -v redis-server >/dev/null && return
    fi
    die "the tests start a Redis server, and no redis-server was found on PATH" \
        "install one: 'apt-get install redis-server' (Debian, Ubuntu), 'dnf install redis' (Fedora, RHEL) or 'brew install redis' (macOS)"
}

# --- faketime --------------------------------------------------------------------------------------

# Whether it is where tests/soak/chaos.py looks for it.
find_faketime() { compgen -G '/usr/lib/*/faketime/libfaketimeMT.so.1' >/dev/null; }

use_faketime() {
    find_faketime && return
    if may_install; then
        say "No faketime found"
        install_one_of libfaketime faketime || true
        find_faketime && return
    fi
    say "no faketime was found in /usr/lib/*/faketime: clocks will not be stepped ('apt-get install libfaketime' on Debian, Ubuntu)"
}
