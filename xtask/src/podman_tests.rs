//! `cargo xtask podman-tests`: runs podman's own system tests with Quire in the place of podman, and writes
//! docs/podman-tests.md: the counts, and the cause of every test that does not pass.
//!
//! The tests are those of podman's repository, which the user gives as a directory. They are neither changed nor copied
//! into this repository.

mod causes;
mod page;
mod tap;

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use rig::process::{is_root, need, quiet, repository};
use rig::{Failed, Skipped, tools};
use tempfile::TempDir;

use crate::install;
use causes::Causes;
use page::Page;
use tap::FileResult;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Numbers of test files, such as 030; by default those of the page
    files: Vec<String>,
    /// Directory with podman's sources, of which only test/system is read
    #[arg(long, value_name = "DIR")]
    podman_source: PathBuf,
    /// Run this binary instead of building one
    #[arg(long, value_name = "FILE")]
    binary: Option<PathBuf>,
    /// Compare the results with the page, and change no file
    #[arg(long)]
    check: bool,
    /// End each test file after this many minutes; the rest of its tests fail
    #[arg(long, value_name = "MINUTES", default_value_t = 20)]
    minutes: u32,
    /// Keep the output of the tests in this directory
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Files of tests that cover what Quire has: containers, their logs, files, networks and users, and logins.
const FILES: [&str; 15] = [
    "030", "035", "045", "050", "055", "065", "075", "130", "140", "150", "160", "170", "195",
    "500", "505",
];

/// Programs that the tests call, each with its Debian package.
const PROGRAMS: [(&str, &str); 11] = [
    ("bats", "bats"),
    ("busybox", "busybox-static"),
    ("crun", "crun"),
    ("docker-registry", "docker-registry"),
    ("htpasswd", "apache2-utils"),
    ("ip", "iproute2"),
    ("jq", "jq"),
    ("newuidmap", "uidmap"),
    ("pasta", "passt"),
    ("skopeo", "skopeo"),
    ("socat", "socat"),
];

/// Directory of the shim and the images' script.
const SCRIPTS: &str = "xtask/podman-tests";

/// Defaults of containers that are podman's: a container in the foreground stays when it ends. With a network that is
/// chosen, Quire also prints no remark about it.
const DEFAULTS: &str = "rm = false\nnetwork = \"none\"\n";

const PAGE: &str = "docs/podman-tests.md";

/// Runs in a separate PID and mount namespace, which ends with this script, and with it all that the tests leave.
/// $1 is the directory of `Place`, $2 the limit in seconds; the other words are files of tests. The tests of pasta skip
/// themselves for root, so an ordinary user runs them.
const SESSION: &str = r##"
    place=$1 limit=$2
    shift 2
    mkdir "$place/images"
    "$place/scripts/images.sh" "$place/images" > "$place/images.log" 2>&1 || { cat "$place/images.log"; exit 1; }
    cd "$place/tests"
    mknod -m 666 "$place/tun" c 10 200
    user="setpriv --reuid=1000 --regid=1000 --clear-groups env USER=alice HOME=$place/user TMPDIR=$place/user/tmp \
        XDG_CONFIG_HOME=$place/user/config XDG_RUNTIME_DIR=$place/user/run QUIRE_STORE=$place/user/store"
    for file; do
        as=
        case $file in
            505-*)
                as=$user
                mount --bind "$place/passwd" /etc/passwd
                for name in subuid subgid; do
                    [ -e /etc/$name ] || : > /etc/$name
                    mount --bind "$place/$name" /etc/$name
                done
                mount --bind "$place/tun" /dev/net/tun
                # As in images.sh: a user gets the remark as well, and one on the first store.
                $as "$QUIRE" load -q -i "$TEST_IMAGE_FILE" > /dev/null 2>&1
                $as "$QUIRE" run --rm "$TEST_IMAGE" true > /dev/null 2>&1
                ;;
            *)
                rm -rf "$QUIRE_STORE"
                "$QUIRE" load -q -i "$TEST_IMAGE_FILE" > /dev/null 2>&1
                ;;
        esac
        status=0
        timeout --kill-after=10 "$limit" $as bats "$file" > "$place/output/$file" 2>&1 < /dev/null || status=$?
        [ $status -ne 124 ] || echo "# more than $limit seconds" >> "$place/output/$file"
        $as "$QUIRE" rm --all --force > /dev/null 2>&1 || true
        "$QUIRE" --store "$REGISTRY_STORE" rm --all --force > /dev/null 2>&1 || true
        [ -z "$as" ] || umount /etc/passwd /etc/subuid /etc/subgid /dev/net/tun
    done
"##;

/// Number of the ordinary user, and of its group.
const USER: u32 = 1000;

pub(crate) fn run(args: &Args) -> Result<()> {
    if !is_root() {
        bail!(Skipped(String::from("the tests run containers as root")));
    }
    tools::install(&PROGRAMS)?;
    let causes = Causes::load(&repository().join(SCRIPTS).join("causes.txt"))?;
    let tests = args.podman_source.join("test/system");
    let files = files(&tests, &args.files)?;
    let binary = args.binary.clone().map_or_else(|| install::build(false), Ok)?;
    let place = place(&tests, &binary)?;
    let ran = session(args.minutes, place.path(), &files);
    if let Some(output) = &args.output {
        keep(&place.path().join("output"), output)?;
    }
    ran?;

    let mut results = Vec::new();
    let mut unknown = Vec::new();
    for name in &files {
        let text = fs::read(place.path().join("output").join(name))?;
        let mut result = FileResult::parse(name, &String::from_utf8_lossy(&text));
        unknown.append(&mut causes.explain(&mut result));
        println!("{name}: {}", result.counts());
        results.push(result);
    }
    let path = repository().join(PAGE);
    let recorded = fs::read_to_string(&path).unwrap_or_default();
    let old = Page::parse(&recorded).context("the page has an unknown form")?;
    let new = old.with(&results).text();
    let differences = page::differences(&recorded, &new);
    if !args.check {
        fs::write(&path, new)?;
    }
    if !unknown.is_empty() {
        let list = unknown.join("\n");
        bail!(Failed(format!("{SCRIPTS}/causes.txt has no cause of these tests:\n{list}")));
    }
    if args.check && !differences.is_empty() {
        bail!(Failed(format!("the results differ from {PAGE}:\n{}", differences.join("\n"))));
    }
    Ok(())
}

/// Returns the names of the files with these numbers.
fn files(tests: &Path, numbers: &[String]) -> Result<Vec<String>> {
    let entries = fs::read_dir(tests)
        .with_context(|| format!("{} has no tests of podman", tests.display()))?;
    let mut all = Vec::new();
    for entry in entries {
        all.push(entry?.file_name().to_string_lossy().into_owned());
    }
    let numbers =
        if numbers.is_empty() { FILES.map(str::to_owned).to_vec() } else { numbers.to_vec() };
    let find = |number: &String| {
        let name = all.iter().find(|it| it.starts_with(&format!("{number}-")));
        name.cloned().with_context(|| format!("{} has no file {number}", tests.display()))
    };
    numbers.iter().map(find).collect()
}

/// Makes a directory with all files of a run, which an ordinary user can read.
fn place(tests: &Path, binary: &Path) -> Result<TempDir> {
    let place = tempfile::tempdir()?;
    let path = |name: &str| place.path().join(name);
    fs::set_permissions(place.path(), fs::Permissions::from_mode(0o755))?;
    for name in ["output", "tmp", "config", "user/tmp", "user/run", "user/config"] {
        fs::create_dir_all(path(name))?;
    }
    for folder in ["config/quire", "user/config/quire"] {
        fs::create_dir_all(path(folder))?;
        fs::write(path(folder).join("run.toml"), DEFAULTS)?;
    }
    for name in ["user", "user/tmp", "user/run", "user/config"] {
        fs::set_permissions(path(name), fs::Permissions::from_mode(0o700))?;
        chown(path(name), Some(USER), Some(USER))?;
    }
    fs::copy(binary, path("quire"))?;
    for (from, to) in [(tests, "tests"), (&repository().join(SCRIPTS), "scripts")] {
        quiet(Command::new("cp").arg("-r").arg(from).arg(path(to)))?;
    }
    let mut chmod = Command::new("chmod");
    quiet(chmod.args(["-R", "a+rX"]).args(["tests", "scripts", "quire"].map(path)))?;
    let passwd = fs::read_to_string("/etc/passwd")?;
    fs::write(path("passwd"), format!("alice:x:{USER}:{USER}::/:/bin/sh\n{passwd}"))?;
    for name in ["subuid", "subgid"] {
        fs::write(path(name), "alice:2000000000:65536\n")?;
    }
    Ok(place)
}

/// Runs the files of tests, each with its own time limit. Their output is in `output` below `place`.
fn session(minutes: u32, place: &Path, files: &[String]) -> Result<()> {
    let path = |name: &str| place.join(name);
    let search = std::env::var_os("PATH").context("there is no PATH")?;
    let search = std::iter::once(path("scripts/bin")).chain(std::env::split_paths(&search));
    let mut unshare = Command::new(need("unshare")?);
    unshare.args(["--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    unshare.args(["sh", "-euc", SESSION, "sh"]).arg(place);
    unshare.arg((minutes * 60).to_string()).args(files);
    unshare
        .env("PATH", std::env::join_paths(search)?)
        .env("PODMAN", path("scripts/podman.sh"))
        .env("PODMAN_TIMEOUT", "30")
        .env("QUIRE", path("quire"))
        .env("QUIRE_STORE", path("store"))
        .env("REGISTRY_STORE", path("registry-store"))
        .env("TEST_IMAGE_FILE", path("test-image.tar"))
        .env("TEST_IMAGE", "quay.io/libpod/testimage:20241011")
        .env("REGISTRY_IMAGE", "quay.io/libpod/registry:2.8.2")
        .env("XDG_CONFIG_HOME", path("config"))
        .env("TMPDIR", path("tmp"))
        .env("LC_ALL", "C.UTF-8");
    let status = unshare.stdin(Stdio::null()).status().context("cannot start unshare")?;
    if !status.success() {
        bail!("the tests did not run: {status}");
    }
    Ok(())
}

fn keep(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from).into_iter().flatten() {
        let entry = entry?;
        fs::copy(entry.path(), to.join(entry.file_name()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shim_is_short() {
        let shim = fs::read_to_string(repository().join(SCRIPTS).join("podman.sh")).unwrap();
        assert!(shim.lines().count() <= 100, "{}", shim.lines().count());
    }

    #[test]
    fn the_page_has_all_files_and_was_written_by_this_task() {
        let text = fs::read_to_string(repository().join(PAGE)).unwrap();
        let page = Page::parse(&text).unwrap();
        assert_eq!(page.text(), text, "`cargo xtask podman-tests` writes {PAGE}");
        let numbers: Vec<_> = page.files().map(|it| it.split('-').next().unwrap()).collect();
        assert_eq!(numbers, FILES);
    }

    #[test]
    fn files_are_found_by_their_numbers() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["030-run.bats", "035-logs.bats", "helpers.bash"] {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let found = files(folder.path(), &[String::from("035")]).unwrap();
        assert_eq!(found, ["035-logs.bats"]);
        let error = files(folder.path(), &[String::from("03")]).unwrap_err();
        assert!(error.to_string().ends_with("has no file 03"), "{error}");
    }
}
