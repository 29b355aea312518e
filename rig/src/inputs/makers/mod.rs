//! Makes images with all available tools: the same content by many writers of tars.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};

use super::layer::{LayerFile, hex};
use super::{layout, rootfs};
use crate::Skipped;
use crate::cache::{Cache, remove};
use crate::process::{is_root, need, quiet};
use crate::tools;
use testing::daemon::{Daemon, PROGRAM};

/// A shell script that makes one or several images. Its variables are
/// - `BASE` and `CONTENT`, the trees to use: a whole system, and a part of it with a directory of special files;
/// - `WORK`, an empty directory, and `REGISTRY`, an empty registry;
/// - `OUT`: the images are `dir:$OUT` and `dir:$OUT-…` in skopeo's notation, which keeps every byte. A script that
///   makes only tars writes the layers to `WORK` as `1.tar` and so on, each with `1.tar.gz` or `1.tar.zst` beside it
///   if the layer is compressed.
struct Maker {
    name: &'static str,
    script: &'static str,
    /// Whether the script may fail because the kernel or a surrounding container forbids its operations.
    is_demanding: bool,
}

macro_rules! maker {
    ($name:literal) => {
        maker!($name, false)
    };
    ($name:literal, $is_demanding:literal) => {
        Maker {
            name: $name,
            script: include_str!(concat!($name, ".sh")),
            is_demanding: $is_demanding,
        }
    };
}

const MAKERS: [Maker; 11] = [
    maker!("gnu-pax"),
    maker!("gnu-old"),
    maker!("posix"),
    maker!("bazel"),
    maker!("git"),
    maker!("umoci"),
    maker!("go"),
    maker!("estargz"),
    maker!("buildah"),
    maker!("podman"),
    // Docker's containers need separate cgroups.
    maker!("docker", true),
];

/// Programs that the scripts need in addition to those of every Debian system; `docker` may be absent.
const PROGRAMS: &str =
    "pigz pax cpio bsdtar zstd git python3 umoci skopeo buildah podman setfattr setfacl";

const CONTENT: &str = include_str!("content.sh");

/// Makes a directory of images in skopeo's `dir` format. `NAME.skipped` has the reason if a maker's image is missing.
pub(crate) fn make(cache: &Cache, refresh: bool) -> Result<PathBuf> {
    let base = rootfs::base(cache, false)?.root();
    let crane = tools::crane(cache)?;
    cache.entry("makers", refresh, |draft| {
        if !is_root() {
            bail!(Skipped(String::from("makers of images need root")));
        }
        // All images are made together, so that an incomplete set is not mistaken for a complete one.
        for program in PROGRAMS.split(' ') {
            need(program)?;
        }
        fs::create_dir(draft)?;
        let work = tempfile::tempdir_in(draft)?;
        let (content, work) = (work.path().join("content"), work.path().join("work"));
        let registry = Daemon::start(draft, "").context("cannot start docker-registry")?;
        let registry = registry.ok_or_else(|| Skipped(format!("{PROGRAM} is not installed")))?;
        let run = |name: &str, script: &str| {
            remove(&work)?;
            fs::create_dir(&work)?;
            // The namespaces end all mounts and processes of a maker.
            let mut shell = Command::new(need("unshare")?);
            shell.args(["--mount", "--propagation=private", "--pid", "--fork", "--kill-child"]);
            shell.args(["--mount-proc", "sh", "-euc", script, name]);
            shell.env("BASE", &base).env("CONTENT", &content).env("WORK", &work);
            shell.env("OUT", draft.join(name)).env("CRANE", &crane);
            shell.env("REGISTRY", &registry.host).env("LC_ALL", "C.UTF-8").env("TZ", "UTC");
            quiet(&mut shell).map(drop)
        };
        run("content", CONTENT)?;
        for maker in &MAKERS {
            println!("images by {}", maker.name);
            match run(maker.name, maker.script) {
                Err(error) if maker.is_demanding => {
                    let reason = format!("{error:#}");
                    let last = reason.lines().last().unwrap_or_default();
                    let reason = format!("{} cannot be used here: {last}\n", maker.name);
                    fs::write(draft.join(format!("{}.skipped", maker.name)), reason)?;
                }
                made => made.with_context(|| format!("cannot make the image {}", maker.name))?,
            }
            let layers = layers(&work)?;
            if !layers.is_empty() {
                assemble(&work, &layers, &draft.join(maker.name))?;
            }
        }
        remove(&work)
    })
}

/// Returns the layers that a script has written.
fn layers(work: &Path) -> Result<Vec<LayerFile>> {
    let mut layers = Vec::new();
    for number in 1.. {
        let tar = work.join(format!("{number}.tar"));
        if !tar.exists() {
            break;
        }
        let diff_id = digest(&tar)?;
        let packed = [("tar.gz", layout::GZIP), ("tar.zst", layout::ZSTD)];
        let mut packed = packed.map(|(end, media)| (tar.with_extension(end), media)).into_iter();
        let (file, media) = packed.find(|it| it.0.exists()).unwrap_or((tar, layout::PLAIN));
        layers.push(LayerFile { digest: digest(&file)?, diff_id, file, media });
    }
    Ok(layers)
}

fn assemble(work: &Path, layers: &[LayerFile], image: &Path) -> Result<()> {
    let draft = work.join("assembled");
    let mut config = layout::Config::default();
    config.command(&["/bin/true"]);
    layout::write(&draft, &config, layers)?;
    let mut copy = Command::new(need("skopeo")?);
    copy.args(["copy", "--quiet", "--preserve-digests"]);
    copy.arg(format!("oci:{}:latest", draft.display())).arg(format!("dir:{}", image.display()));
    quiet(&mut copy).map(drop)
}

/// Returns the SHA-256 of a file in lower-case hex.
fn digest(path: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer) {
            Ok(0) => return Ok(hex(&hash.finalize())),
            Ok(read) => hash.update(&buffer[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
}
