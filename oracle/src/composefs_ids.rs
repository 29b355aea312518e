//! Compares the ids of `quire show --composefs-id` with those of composefs-rs's `cfsctl oci compute-id`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use rig::cache::Cache;
use rig::process::quire;
use rig::{Failed, Skipped, tools};
use testing::odd_layouts::{OddLayout, odd_layouts, random_layout};

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// The `cfsctl` to compare with, instead of that of `cargo xtask inputs cfsctl`
    #[arg(long, value_name = "FILE")]
    cfsctl: Option<PathBuf>,
    /// Seed of the first random image; each further image takes the next number
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Number of random images
    #[arg(long, default_value_t = 100)]
    count: u64,
    /// Compare only the smallest one of the real images
    #[arg(long)]
    short: bool,
    /// Also compare the images of these OCI layouts, each as DIR or DIR:TAG; by default those of the cache
    #[arg(value_name = "LAYOUT")]
    layouts: Vec<String>,
    /// Write the ids of the unusual images to this file
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,
}

/// Inputs that are OCI layouts.
const INPUTS: [&str; 7] = [
    "debian-small",
    "debian-nginx",
    "debian-postgres",
    "debian-node",
    "debian-numpy",
    "debian-jvm",
    "debian-large",
];

/// The repositories that are compared: the algorithm, and the layout of the images.
const REPOSITORIES: [(&str, &str); 3] = [("sha256", "1"), ("sha512", "1"), ("sha512", "2")];

/// The trees whose ids are compared: the name in the file of ids, and the option of both programs.
const TREES: [(&str, &[&str]); 2] = [("oci", &[]), ("bootable", &["--bootable"])];

/// Message of `cfsctl` for a tree that its writer refuses, so that there is no image with the id.
const REFUSED_LATE: &str = "whiteout inode has nlink > 1";

struct Harness {
    cfsctl: PathBuf,
    quire: PathBuf,
    work: PathBuf,
    equal: u64,
    refused: u64,
    /// Number of ids that only Quire prints, because cfsctl refuses to write the image.
    late: u64,
    different: u64,
    ids: String,
}

pub(super) fn run(args: &Args) -> Result<()> {
    let cache = Cache::open()?;
    let cfsctl = args.cfsctl.clone().or_else(|| tools::built_cfsctl(&cache));
    let Some(cfsctl) = cfsctl else {
        bail!(Skipped("there is no cfsctl: run `cargo xtask inputs cfsctl`".to_owned()));
    };
    let work = tempfile::tempdir()?;
    let mut harness = Harness {
        cfsctl,
        quire: quire()?,
        work: work.path().to_owned(),
        equal: 0,
        refused: 0,
        late: 0,
        different: 0,
        ids: String::new(),
    };
    for layout in odd_layouts() {
        let lines = harness.made(&layout)?;
        harness.ids.push_str(&lines);
    }
    for seed in args.seed..args.seed + args.count {
        harness.made(&random_layout(seed))?;
    }
    let mut layouts = args.layouts.clone();
    if layouts.is_empty() {
        let count = if args.short { 1 } else { INPUTS.len() };
        let made = INPUTS.iter().take(count).map(|it| cache.dir().join(it));
        layouts.extend(made.filter(|it| it.exists()).map(|it| it.display().to_string()));
    }
    for layout in &layouts {
        harness.compare(layout, layout)?;
    }
    let Harness { equal, refused, late, different, ids, .. } = harness;
    println!(
        "{equal} ids equal, {refused} refused by both, {late} that cfsctl refuses to write, {different} differences"
    );
    if let Some(file) = &args.write {
        fs::write(file, ids).with_context(|| format!("cannot write {}", file.display()))?;
    }
    match different {
        0 => Ok(()),
        count => bail!(Failed(format!("{count} differences"))),
    }
}

/// The answer of a program: its output, or its error.
type Answer = std::result::Result<String, String>;

fn answer(command: &mut Command) -> Result<Answer> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    Ok(if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) })
}

impl Harness {
    /// Compares the ids of an image that is written first.
    fn made(&mut self, image: &OddLayout) -> Result<String> {
        let directory = self.work.join("layout");
        image.write(&directory);
        let lines = self.compare(&image.name, &directory.display().to_string());
        fs::remove_dir_all(&directory)?;
        lines
    }

    /// Compares the ids of an image, and returns those of `cfsctl` as lines of the file of ids.
    fn compare(&mut self, name: &str, layout: &str) -> Result<String> {
        let (store, repository) = (self.work.join("store"), self.work.join("repository"));
        let quire = || {
            let mut command = Command::new(&self.quire);
            command.arg("--store").arg(&store);
            command
        };
        let source = if layout.rsplit('/').next().is_some_and(|it| it.contains(':')) {
            format!("oci:{layout}")
        } else {
            format!("oci:{layout}:latest")
        };
        let imported = answer(quire().args(["import", "--form", "objects", &source, "image"]))?;
        let mut lines = String::new();
        for (algorithm, version) in REPOSITORIES {
            let cfsctl = |words: &[&str]| {
                let mut command = Command::new(&self.cfsctl);
                command.args(["--insecure", "--hash", algorithm, "--repo"]).arg(&repository);
                command.args(["--erofs-version", version]).env("RUST_BACKTRACE", "0");
                answer(command.args(words))
            };
            let kind = format!("fsverity-{algorithm}-12");
            let init = ["init", "--insecure", "--algorithm", &kind, "--erofs-version", version];
            cfsctl(&init)?.map_err(|it| anyhow::anyhow!("cfsctl init: {it}"))?;
            let pulled = cfsctl(&["oci", "pull", &source, "image"])?;
            for (tree, options) in TREES {
                let theirs = match &pulled {
                    Err(error) => Err(error.clone()),
                    Ok(_) => cfsctl(&[&["oci", "compute-id", "image"], options].concat())?,
                };
                let id = format!("--composefs-id={algorithm}");
                let ours = match &imported {
                    Err(error) => Err(error.clone()),
                    Ok(_) => {
                        let mut show = quire();
                        show.args(["show", &id, "--erofs-version", version]).args(options);
                        answer(show.arg("image"))?
                    }
                };
                match (&ours, &theirs) {
                    (Ok(ours), Ok(theirs)) if ours == theirs => self.equal += 1,
                    (Err(_), Err(_)) => self.refused += 1,
                    (Ok(_), Err(error)) if error.contains(REFUSED_LATE) => self.late += 1,
                    _ => {
                        self.different += 1;
                        println!(
                            "{name}, {algorithm}, layout {version}, {tree}:\n  quire  {ours:?}\n  cfsctl {theirs:?}"
                        );
                    }
                }
                let id = theirs.as_deref().unwrap_or("refused");
                lines.push_str(&format!("{name} {algorithm} {version} {tree} {id}\n"));
            }
            remove(&repository)?;
        }
        remove(&store)?;
        Ok(lines)
    }
}

fn remove(directory: &Path) -> Result<()> {
    rig::cache::remove(directory)
}
