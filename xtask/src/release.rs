//! `cargo xtask release`: makes the files that a release publishes, from the last commit. `docs/release.md` describes
//! them.
//!
//! Two runs for the same commit and compilers give identical files: all inputs come from git, times are the
//! commit's, and no path of this machine remains.

mod compile;
mod documents;
pub(crate) mod node_image;
mod pack;

use std::fs;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;

use anyhow::{Context as _, Result, bail};
use rig::cache::{Cache, remove};
use rig::process::{is_root, need, quiet, repository, shown, target_dir};
use rig::{Failed, tools};

use crate::{deb, debian_compiler};
use documents::Documents;
use node_image::NodeImage;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Output directory; files in it are replaced
    #[arg(long, value_name = "DIR", default_value = "target/release-files")]
    output: PathBuf,
    /// Target to build for; may be repeated. The first one must run on this machine. Default: x86-64 and aarch64, if
    /// Rust's libraries for them are installed. Without its library, aarch64 is compiled by Debian's compiler, which
    /// needs root; with --check, it is left out
    #[arg(long = "target", value_name = "TRIPLE")]
    targets: Vec<String>,
    /// Secret key of minisign that signs SHA256SUMS
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,
    /// Maintainer of the Debian packages as `NAME <ADDRESS>`
    #[arg(long, value_name = "WHO", default_value = deb::MAINTAINER)]
    maintainer: String,
    /// Only check: make the files twice, from sources in two directories, and compare them
    #[arg(long, conflicts_with_all = ["output", "key"])]
    check: bool,
}

impl Args {
    /// Chooses the targets. `is_installed` returns whether Rust's library for a target is installed.
    fn targets(&self, is_installed: impl Fn(&str) -> Result<bool>) -> Result<Targets> {
        if !self.targets.is_empty() {
            return Ok(Targets { built: self.targets.clone(), left_out: Vec::new() });
        }
        let mut targets = Targets::default();
        for target in compile::TARGETS {
            let by_debian = target == debian_compiler::TARGET && is_root() && !self.check;
            if by_debian || is_installed(target)? {
                targets.built.push(target.to_owned());
            } else {
                let reason = compile::not_installed(target);
                targets.left_out.push(format!("no release for {target}: {reason}"));
            }
        }
        Ok(targets)
    }
}

/// The targets of a release.
#[derive(Debug, Default)]
struct Targets {
    built: Vec<String>,
    /// The reasons why targets are left out, each with its target.
    left_out: Vec<String>,
}

/// The commit of a release.
#[derive(Debug)]
struct Commit {
    /// The first 12 digits of its hash, as in `quire --version`.
    hash: String,
    /// Its time, in seconds since 1970.
    seconds: String,
}

/// Sources of the commit, and the directories of one build.
#[derive(Debug)]
struct Place {
    sources: PathBuf,
    /// Target directory of cargo.
    built: PathBuf,
    /// Directory of the published files.
    output: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let commit = last_commit()?;
    let Targets { built: targets, left_out } =
        args.targets(|it| compile::is_installed(it, repository()))?;
    // `check-all` counts these lines.
    for reason in left_out {
        println!("SKIPPED: {reason}");
    }
    // Before the builds, because these take minutes.
    obtain()?;
    if let Some(key) = &args.key {
        check_key(key)?;
    }
    if args.check {
        return check(args, &targets, &commit);
    }
    let work = target_dir()?.join("release-work");
    let place = Place { sources: work.join("sources"), built: work, output: args.output.clone() };
    let binaries = compile(&targets, &commit, &place)?;
    make(args, &targets, &binaries, &commit, &place)?;
    if let Some(key) = &args.key {
        sign(&place.output, key, &commit)?;
    }
    list(&place.output)
}

/// Obtains the programs that make a release.
fn obtain() -> Result<()> {
    let cache = Cache::open()?;
    tools::cargo_about(&cache)?;
    tools::cargo_cyclonedx(&cache)?;
    tools::cargo_deb(&cache).map(drop)
}

/// Prints the files of a release, and their sizes.
fn list(output: &Path) -> Result<()> {
    for name in names(output)? {
        let path = output.join(name);
        println!("{:9} {}", fs::metadata(&path)?.len(), path.display());
    }
    Ok(())
}

/// Returns the last commit. Files that are changed or new since would be in a release without being in its version.
fn last_commit() -> Result<Commit> {
    let git = |words: &[&str]| {
        let mut git = Command::new("git");
        quiet(git.args(words).current_dir(repository()))
    };
    // New files below `dist`, for example, would also be packaged.
    let changed = git(&["status", "--porcelain"])?;
    if !changed.is_empty() {
        bail!("these files are changed or new; a release is made from a commit:\n{changed}");
    }
    let text = git(&["log", "-1", "--format=%H %ct"])?;
    let (hash, seconds) = text.trim_end().split_once(' ').context("git printed no time")?;
    let hash = hash.get(..12).context("git printed no hash")?;
    Ok(Commit { hash: hash.to_owned(), seconds: seconds.to_owned() })
}

/// Exports the sources and compiles them. Returns the binaries, in the order of the targets.
fn compile(targets: &[String], commit: &Commit, place: &Place) -> Result<Vec<PathBuf>> {
    pack::export(&place.sources)?;
    targets.iter().map(|target| compile::binary(place, target, commit)).collect()
}

/// Makes all files of a release except for the signature, from the compiled binaries.
fn make(
    args: &Args,
    targets: &[String],
    binaries: &[PathBuf],
    commit: &Commit,
    place: &Place,
) -> Result<()> {
    let cache = Cache::open()?;
    let output = &place.output;
    remove(output)?;
    fs::create_dir_all(output)?;
    // An absolute path, because most commands below run in other directories.
    let output = &output.canonicalize()?;
    let version = env!("CARGO_PKG_VERSION");
    let name = |suffix: &str| output.join(format!("quire-{version}-{suffix}"));
    pack::source_tarball(&name("source.tar.xz"), &format!("quire-{version}"))?;
    // Man pages and completions are the same for all machines.
    let runs = binaries.first().context("a release has a target")?;
    for (target, binary) in targets.iter().zip(binaries) {
        let machine = target.split('-').next().unwrap_or(target);
        let documents = Documents::make(&cache, place, target, commit)?;
        let stage = place.built.join("stage");
        remove(&stage)?;
        let top = stage.join(format!("quire-{version}-{machine}-linux"));
        pack::lay(binary, runs, &documents, &top)?;
        pack::tarball(&top, &name(&format!("{machine}-linux.tar.xz")), commit)?;
        fs::copy(&documents.bill, name(&format!("{machine}-linux.cdx.json")))?;
        let image = NodeImage {
            binary,
            runs,
            notices: Some(&documents.notices),
            machine,
            hash: &commit.hash,
            seconds: &commit.seconds,
        };
        image.make(&name(&format!("{machine}-image.tar")))?;
        let package = deb::Package {
            binary,
            runs,
            notices: Some(&documents.notices),
            maintainer: &args.maintainer,
            target: Some(target),
            is_fast: false,
        };
        let package = package.make(&tools::cargo_deb(&cache)?)?;
        fs::copy(&package, output.join(package.file_name().context("it has a name")?))?;
    }
    let mut sums = Command::new(need("sha256sum")?);
    let sums = quiet(sums.args(names(output)?).current_dir(output))?;
    fs::write(output.join(SUMS), sums)?;
    Ok(())
}

/// File with the digests of all other files. The signature covers this file.
const SUMS: &str = "SHA256SUMS";

/// Returns the sorted names of the files in a directory.
fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(folder)? {
        names.push(entry?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Length of a secret key: 158 bytes in base64. A public key has 42. Source: minisign's `minisign.h`, `SeckeyStruct`.
const SECRET_KEY: usize = 212;

/// Refuses a key that cannot be read, or is none of minisign's.
fn check_key(key: &Path) -> Result<()> {
    tools::install(&[("minisign", "minisign")])?;
    let text = fs::read_to_string(key).with_context(|| format!("cannot read {}", key.display()))?;
    let mut lines = text.lines();
    let has_comment = lines.next().is_some_and(|it| it.starts_with("untrusted comment:"));
    if !has_comment || lines.next().map(str::len) != Some(SECRET_KEY) {
        bail!("{} is not a secret key of minisign: `minisign -G -s FILE` makes one", key.display());
    }
    Ok(())
}

/// Signs the digests. minisign asks for the key's password, if the key has one.
fn sign(output: &Path, key: &Path, commit: &Commit) -> Result<()> {
    tools::install(&[("minisign", "minisign")])?;
    let mut minisign = Command::new(need("minisign")?);
    minisign.arg("-S").arg("-s").arg(key).arg("-m").arg(output.join(SUMS));
    // Without a comment, minisign signs the current time.
    let comment = format!("quire {} {}", env!("CARGO_PKG_VERSION"), commit.hash);
    shown(minisign.args(["-t", &comment]))
}

/// Makes the files twice, and compares them.
fn check(args: &Args, targets: &[String], commit: &Commit) -> Result<()> {
    let work = tempfile::tempdir_in(target_dir()?)?;
    // The two paths differ in length, because the length of a path could change the layout of a binary.
    let places = ["a", "another/directory"].map(|it| {
        let folder = work.path().join(it);
        Place {
            sources: folder.join("sources"),
            built: folder.join("built"),
            output: folder.join("output"),
        }
    });
    // In parallel, because the longest step, the optimization of the whole program, uses one processor.
    let binaries = thread::scope(|scope| {
        let builds = places.each_ref().map(|it| scope.spawn(|| compile(targets, commit, it)));
        builds.map(|it| it.join().unwrap_or_else(|panic| resume_unwind(panic)))
    });
    for (place, binaries) in places.iter().zip(binaries) {
        make(args, targets, &binaries?, commit, place)?;
    }
    let [first, second] = places.map(|it| it.output);
    compare(&first, &second)?;
    list(&first)?;
    println!("{} files are identical", names(&first)?.len());
    Ok(())
}

/// Checks that two directories have the same files.
fn compare(first: &Path, second: &Path) -> Result<()> {
    let all = names(first)?;
    if all != names(second)? {
        bail!(Failed(format!("{all:?} in one directory, {:?} in the other", names(second)?)));
    }
    for name in all {
        if fs::read(first.join(&name))? != fs::read(second.join(&name))? {
            bail!(Failed(format!("{name} differs if it is built in another directory")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rig::process::find_program;

    use super::*;

    /// `docs/release.md`, "Verify and install".
    #[test]
    fn digests_are_signed() {
        let Some(minisign) = find_program("minisign") else {
            return testing::skipped("minisign is not installed");
        };
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let minisign = |words: &[&str]| {
            let mut minisign = Command::new(&minisign);
            minisign.args(words).arg("-p").arg(path("quire.pub")).current_dir(place.path());
            quiet(&mut minisign)
        };
        minisign(&["-G", "-W", "-s", "quire.key"]).unwrap();
        fs::write(path(SUMS), "digests").unwrap();
        // The command refuses other files before it builds.
        check_key(&path("quire.key")).unwrap();
        for (name, expect) in
            [("quire.pub", "not a secret key"), (SUMS, "not a secret key"), ("a", "cannot read")]
        {
            let error = check_key(&path(name)).unwrap_err().to_string();
            assert!(error.contains(expect), "{name}: {error}");
        }
        let commit = Commit { hash: "0123456789ab".to_owned(), seconds: "0".to_owned() };
        sign(place.path(), &path("quire.key"), &commit).unwrap();
        let verified = minisign(&["-V", "-m", SUMS]).unwrap();
        let comment = format!("quire {} 0123456789ab\n", env!("CARGO_PKG_VERSION"));
        assert!(verified.ends_with(&comment), "{verified}");
        fs::write(path(SUMS), "other digests").unwrap();
        assert!(minisign(&["-V", "-m", SUMS]).is_err());
    }

    #[test]
    fn targets_that_are_left_out_are_named() {
        let args = |targets: &[&str]| Args {
            output: PathBuf::new(),
            targets: targets.iter().map(|it| (*it).to_owned()).collect(),
            key: None,
            maintainer: deb::MAINTAINER.to_owned(),
            check: true,
        };
        let [first, second] = compile::TARGETS;
        let targets = args(&[]).targets(|it| Ok(it == first)).unwrap();
        assert_eq!(targets.built, [first]);
        let [reason] = &targets.left_out[..] else { panic!("{targets:?}") };
        assert!(reason.contains(second) && reason.contains("rustup target add"), "{reason}");
        assert!(args(&[]).targets(|_| Ok(true)).unwrap().left_out.is_empty());
        // A named target fails later if it cannot be built.
        let targets = args(&[second]).targets(|_| Ok(false)).unwrap();
        assert_eq!((targets.built, targets.left_out), (vec![second.to_owned()], Vec::new()));
    }

    #[test]
    fn different_files_are_found() {
        let place = tempfile::tempdir().unwrap();
        let [one, two] = ["one", "two"].map(|it| place.path().join(it));
        let write = |folder: &Path, name: &str, text: &str| {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join(name), text).unwrap();
        };
        let check = |expected: Option<&str>| {
            let error = compare(&one, &two).err().map(|it| it.to_string());
            match expected {
                Some(part) => assert!(error.unwrap().contains(part), "{part}"),
                None => assert_eq!(error, None),
            }
        };
        for folder in [&one, &two] {
            write(folder, "quire.deb", "package");
        }
        check(None);
        write(&two, "quire.deb", "another package");
        check(Some("quire.deb differs"));
        write(&two, "quire.deb", "package");
        write(&two, SUMS, "");
        check(Some("in the other"));
    }
}
