//! Compares the composefs tools: the same dump must give the same image or a refusal, and an image the same text.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};

use super::generate::{self, Range};
use super::mutate::{self, Damage};
use rig::cache::{Cache, remove};
use rig::inputs::sid;
use rig::process::{self, quire};
use rig::random::Random;
use rig::{Failed, tools};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Seed of the first case; each further case takes the next number
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of random dumps; each is tried whole and with one damage
    #[arg(long, default_value_t = 300)]
    count: u64,
    /// Writer to use instead of the built `quire`; called as `CMD OPTIONS --from-file DUMP IMAGE`
    #[arg(long, value_name = "CMD")]
    writer_cmd: Option<PathBuf>,
    /// Reader to use instead of the built `quire`; called as `CMD ls|objects|dump IMAGE`
    #[arg(long, value_name = "CMD")]
    reader_cmd: Option<PathBuf>,
    /// Other writer to use instead of Debian sid's
    #[arg(long, value_name = "CMD")]
    against: Option<PathBuf>,
    /// Compare with the `composefs` crate, on dumps that it supports; builds the crate with OpenSSL
    #[arg(long, conflicts_with_all = ["against", "no_reader", "no_damage"])]
    composefs_crate: bool,
    /// Compare images only
    #[arg(long)]
    no_reader: bool,
    /// Try valid dumps only
    #[arg(long)]
    no_damage: bool,
    /// Keep the files of differing cases in this directory
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
}

/// The programs of one side of the comparison.
struct Tools {
    writer: PathBuf,
    reader: Option<PathBuf>,
}

/// Invalid input that C's mkcomposefs accepts, identified by Quire's error message: the message, and the bug of C.
const FAULTS_OF_C: [(&str, &str); 6] = [
    (
        "DIGEST is",
        "writes uninitialised bytes for a digest that is none, and reads one only up to a NUL",
    ),
    ("the hard link has no target", "makes a hardlink to the root directory"),
    ("a directory cannot be hard linked", "makes a hardlink to a directory"),
    ("cannot have 18446744073709551615 bytes", "counts this many bytes as no chunk"),
    ("GID is", "overlooks a wrong GID where UID is not 0"),
    ("RDEV is", "overlooks a wrong RDEV where UID is not 0"),
];

/// Returns a program's output as one line of limited length.
fn error(text: &[u8]) -> String {
    String::from_utf8_lossy(text).trim().replace('\n', " ").chars().take(400).collect()
}

fn fault_of_c(our_error: &str) -> Option<&'static str> {
    FAULTS_OF_C.iter().find(|(text, _)| our_error.contains(text)).map(|(_, fault)| *fault)
}

pub(super) fn run(args: &Args) -> Result<()> {
    let work = tempfile::tempdir()?;
    let ours = match &args.writer_cmd {
        Some(writer) => Tools { writer: writer.clone(), reader: args.reader_cmd.clone() },
        None => {
            let quire = quire()?;
            let link = |name| -> Result<PathBuf> {
                let path = work.path().join(name);
                symlink(&quire, &path)?;
                Ok(path)
            };
            let reader = match &args.reader_cmd {
                Some(reader) => reader.clone(),
                None => link("composefs-info")?,
            };
            Tools { writer: link("mkcomposefs")?, reader: Some(reader) }
        }
    };
    let range = if args.composefs_crate { Range::Plain } else { Range::Full };
    let theirs = match range {
        Range::Full => {
            let sid = sid::make(&Cache::open()?, false)?;
            let writer = args.against.clone().unwrap_or_else(|| sid.script("mkcomposefs"));
            Tools { writer, reader: Some(sid.script("composefs-info")) }
        }
        Range::Plain => Tools { writer: composefs_crate()?, reader: None },
    };
    let mut tally = Tally::default();
    for seed in args.seed..args.seed + args.count {
        let mut case =
            Case { seed, dir: work.path(), keep: args.keep.as_deref(), tally: &mut tally };
        let mut random = Random::new(seed);
        let dump = generate::dump(&mut random, range);
        let options = match range {
            Range::Full => Options::random(&mut random, dump.strict),
            // The crate upgrades version 0 to 1 by other rules than C.
            Range::Plain => Options::ONE,
        };
        let image = case.images("whole", &dump.text(), &options, None, &ours, &theirs)?;
        if let (Some(image), false, false) = (&image, args.no_reader, dump.c_misreads) {
            case.texts(image, &ours, &theirs)?;
        } else if image.is_none() {
            case.tally.refused_whole += 1;
        }
        if !args.no_damage && range == Range::Full {
            let damaged = mutate::damaged(&dump, &mut random);
            let options = Options::random(&mut random, true);
            let damage = Some(damaged.damage);
            case.images("damaged", &damaged.text, &options, damage, &ours, &theirs)?;
        }
    }
    tally.print();
    match tally.differences {
        0 => Ok(()),
        count => bail!(Failed(format!("{count} differences"))),
    }
}

/// Builds the writer that uses the `composefs` crate: `PROGRAM DUMP IMAGE`.
fn composefs_crate() -> Result<PathBuf> {
    let mut cargo = process::cargo();
    cargo.args(["build", "--quiet", "--release", "--package", "composefs-crate-oracle"]);
    cargo.arg("--manifest-path").arg(process::repository().join("oracle/Cargo.toml"));
    process::shown(cargo.arg("--target-dir").arg(process::target_dir()?))?;
    tools::built_composefs_crate()?.context("cargo has built it")
}

pub(super) fn print(seed: u64) -> Result<()> {
    let dump = generate::dump(&mut Random::new(seed), Range::Full);
    std::io::stdout().write_all(&dump.text())?;
    Ok(())
}

/// The options of both writers.
struct Options {
    arguments: &'static [&'static str],
    strict: bool,
}

impl Options {
    const ONE: Self = Self { arguments: &["--min-version=1", "--max-version=1"], strict: false };

    fn random(random: &mut Random, may_be_strict: bool) -> Self {
        let arguments: [&[&str]; 5] = [
            &[],
            &["--min-version=0", "--max-version=0"],
            &["--min-version=1", "--max-version=1"],
            &["--min-version=0", "--max-version=1"],
            &["--min-version=0"],
        ];
        Self { arguments: *random.pick(&arguments), strict: may_be_strict && random.percent(30) }
    }
}

#[derive(Debug, Default)]
struct Tally {
    equal: u64,
    refused: u64,
    /// Undamaged dumps that both writers refuse, which is a bug of the generator and not a difference.
    refused_whole: u64,
    texts: u64,
    faults_of_c: BTreeMap<&'static str, u64>,
    differences: u64,
}

impl Tally {
    fn print(&self) {
        println!("{} images equal, {} inputs refused by both", self.equal, self.refused);
        println!("{} texts about images equal", self.texts);
        if self.refused_whole > 0 {
            println!("{} of the refused were not damaged", self.refused_whole);
        }
        for (fault, count) in &self.faults_of_c {
            println!("{count} refused by ours but not by C, which {fault}");
        }
        println!("{} differences", self.differences);
    }
}

struct Case<'a> {
    seed: u64,
    dir: &'a Path,
    keep: Option<&'a Path>,
    tally: &'a mut Tally,
}

impl Case<'_> {
    /// Compares the writers' images of a dump, and returns the path of the image if both wrote the same.
    fn images(
        &mut self,
        what: &str,
        text: &[u8],
        options: &Options,
        damage: Option<Damage>,
        ours: &Tools,
        theirs: &Tools,
    ) -> Result<Option<PathBuf>> {
        let dump = self.dir.join("dump");
        fs::write(&dump, text)?;
        let paths = ["ours", "theirs"].map(|name| self.dir.join(name));
        let mut answers = Vec::new();
        for (tools, path) in [ours, theirs].into_iter().zip(&paths) {
            remove(path)?;
            let mut command = Command::new(&tools.writer);
            command.args(options.arguments).arg("--from-file").arg(&dump).arg(path);
            if options.strict {
                command.env("CFS_PARSE_STRICT", "1");
            }
            let output = command.stdin(Stdio::null()).output();
            let output =
                output.with_context(|| format!("cannot start {}", tools.writer.display()))?;
            let image = if output.status.success() { Some(fs::read(path)?) } else { None };
            answers.push((output.status, output.stderr, image));
        }
        let [(our_status, our_error, our_image), (their_status, their_error, their_image)] =
            <[_; 2]>::try_from(answers).expect("two writers were called");
        let detail = match (&our_image, &their_image) {
            (Some(ours), Some(theirs)) if ours == theirs => {
                self.tally.equal += 1;
                return Ok(Some(paths[0].clone()));
            }
            (Some(ours), Some(theirs)) => {
                let at = ours.iter().zip(theirs).position(|(ours, theirs)| ours != theirs);
                let at = at.unwrap_or(ours.len().min(theirs.len()));
                format!("{} and {} bytes, first difference at {at:#x}", ours.len(), theirs.len())
            }
            // Quire refuses with exit code 1; the other program may also crash.
            (None, None) if our_status.code() == Some(1) => {
                self.tally.refused += 1;
                return Ok(None);
            }
            (None, None) => format!("ours ended with {our_status}: {}", error(&our_error)),
            (None, Some(_)) => match damage {
                Some(_)
                    if our_status.code() == Some(1) && fault_of_c(&error(&our_error)).is_some() =>
                {
                    let fault = fault_of_c(&error(&our_error)).expect("just looked");
                    *self.tally.faults_of_c.entry(fault).or_default() += 1;
                    return Ok(None);
                }
                _ => format!("ours refuses ({our_status}): {}", error(&our_error)),
            },
            (Some(_), None) => format!("theirs refuses ({their_status}): {}", error(&their_error)),
        };
        let damage = damage.map_or(String::new(), |it| format!(", damage {it:?}"));
        let strict = if options.strict { ", strict" } else { "" };
        self.differ(&format!("{what}{damage}{strict}, {:?}: {detail}", options.arguments))?;
        Ok(None)
    }

    /// Compares the readers' output for an image.
    fn texts(&mut self, image: &Path, ours: &Tools, theirs: &Tools) -> Result<()> {
        let (Some(ours), Some(theirs)) = (&ours.reader, &theirs.reader) else {
            return Ok(());
        };
        for verb in ["ls", "objects", "dump"] {
            let ask = |reader: &Path| -> Result<(bool, Vec<u8>, String)> {
                let output =
                    Command::new(reader).arg(verb).arg(image).stdin(Stdio::null()).output();
                let output =
                    output.with_context(|| format!("cannot start {}", reader.display()))?;
                Ok((output.status.success(), output.stdout, error(&output.stderr)))
            };
            let ((our_ok, our_text, our_error), (their_ok, their_text, their_error)) =
                (ask(ours)?, ask(theirs)?);
            // Output before a failure does not count.
            if our_ok == their_ok && (!our_ok || our_text == their_text) {
                self.tally.texts += 1;
                continue;
            }
            if our_ok != their_ok {
                let error = if our_ok {
                    format!("theirs: {their_error}")
                } else {
                    format!("ours: {our_error}")
                };
                self.differ(&format!("composefs-info {verb} refused by {error}"))?;
                continue;
            }
            let lines = |text: &[u8]| -> Vec<Vec<u8>> {
                text.split(|it| *it == b'\n').map(<[u8]>::to_vec).collect()
            };
            let (our_lines, their_lines) = (lines(&our_text), lines(&their_text));
            let at = our_lines.iter().zip(&their_lines).position(|(ours, theirs)| ours != theirs);
            let at = at.unwrap_or(our_lines.len().min(their_lines.len()));
            let cut = |lines: &[Vec<u8>]| {
                lines
                    .get(at)
                    .map(|it| String::from_utf8_lossy(it).chars().take(300).collect::<String>())
            };
            self.differ(&format!(
                "composefs-info {verb}: line {}\n  ours   {:?}\n  theirs {:?}",
                at + 1,
                cut(&our_lines),
                cut(&their_lines),
            ))?;
        }
        Ok(())
    }

    fn differ(&mut self, text: &str) -> Result<()> {
        self.tally.differences += 1;
        println!("DIFFERENCE seed {}: {text}", self.seed);
        if let Some(keep) = self.keep {
            let to = keep.join(format!("{}-{}", self.seed, self.tally.differences));
            fs::create_dir_all(&to)?;
            for name in ["dump", "ours", "theirs"] {
                if self.dir.join(name).exists() {
                    fs::copy(self.dir.join(name), to.join(name))?;
                }
            }
        }
        Ok(())
    }
}
