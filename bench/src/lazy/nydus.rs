//! Nydus v3: its fanotify service, which serves an EROFS image by the same kernel mechanism as Quire.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::containers::{Containers, digest, end, script, send};
use super::{Converted, Draft, Stage, Start, Way};
use crate::command::{cmd, run, run_all};
use crate::mounts::unmount_all;
use crate::registry::layers;
use crate::samples::Program;
use crate::tls;
use rig::cache::remove;
use rig::process::quiet;

/// Digest of an image's compressed bootstrap. The image is made by `nydus build` of each layer and `nydus merge`, like
/// `nydusify convert`.
pub(super) type Digest = String;

pub(super) struct Nydus<'a> {
    pub(super) name: &'static str,
    pub(super) containers: &'a Containers<'a>,
    pub(super) converted: &'a Converted<Digest>,
    /// Whether the image is optimized for the program that runs, so that the data that the program reads is
    /// prefetched.
    pub(super) is_optimized: bool,
}

/// $1 nydus, $2 the bootstrap's address, $4 and further ones options of curl. Fetches and unpacks the bootstrap. The
/// service prints nothing when it has mounted the image, so the script waits for the mount.
const MOUNT: &str = r#"
cd "$3"
curl -sSf "${@:4}" "$2" | gzip -d > bootstrap
NO_PROXY='*' "$1" fanotify --bootstrap bootstrap --config config.yml --mountpoint "$3/lower" --log-dir "$3/log" \
    --log-level warn > said 2>&1 &
echo $! > pid
until mountpoint -q lower; do kill -0 $!; sleep 0.002; done
"#;

impl Way for Nydus<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn before_with(&self, start: &Start<'_>, prepare: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        self.containers.before(&["lower", "cache", "log"])?;
        prepare(&self.data())?;
        let place = self.containers.place();
        let text = config(start, &place.join("cache"), self.is_optimized);
        Ok(fs::write(place.join("config.yml"), text)?)
    }

    fn data(&self) -> PathBuf {
        self.containers.place().join("cache")
    }

    fn is_prepared(&self) -> bool {
        self.is_optimized
    }

    fn mount(&self, start: &Start<'_>) -> Result<Vec<Command>> {
        Ok(vec![self.serve(start, &self.converted.plain)])
    }

    fn tree(&self) -> PathBuf {
        self.containers.place().join("lower")
    }

    fn run(&self, start: &Start<'_>, program: &Program) -> Result<Vec<Command>> {
        let bootstrap = self.converted.of(self.is_optimized, program)?;
        let run = self.containers.run(&[self.tree()], program)?;
        Ok(std::iter::once(self.serve(start, bootstrap)).chain(run).collect())
    }

    fn after(&self) -> Result<()> {
        self.containers.after()?;
        end(&self.containers.place().join("pid"))
    }
}

impl Nydus<'_> {
    /// Fetches a bootstrap and mounts it.
    fn serve(&self, start: &Start<'_>, bootstrap: &str) -> Command {
        let address = format!("{}/blobs/sha256:{bootstrap}", repository(start));
        let place = self.containers.place();
        let nydus = &self.converted.program;
        let mut mount = script(MOUNT, &[nydus.as_ref(), address.as_ref(), place.as_ref()]);
        if start.certificate.is_some() {
            // It has the token already, so it does not wait for one.
            mount.args(["--insecure", "-H", &format!("Authorization: Bearer {}", tls::TOKEN)]);
        }
        mount
    }
}

fn repository(start: &Start<'_>) -> String {
    let scheme = if start.certificate.is_some() { "https" } else { "http" };
    format!("{scheme}://{}/v2/{}-nydus", start.host, start.sample.name)
}

fn config(start: &Start<'_>, cache: &Path, prefetch: bool) -> String {
    // Nydus uses HTTP if the registry is "insecure".
    let scheme = if start.certificate.is_some() { "skip_verify" } else { "insecure" };
    format!(
        "backend:\n  type: registry\n  config:\n    host: {}\n    repo: {}-nydus\n    {scheme}: true\n\
         cache:\n  type: local\n  config:\n    dir: {}\nprefetch:\n  enable: {prefetch}\n",
        start.host,
        start.sample.name,
        cache.display()
    )
}

/// Converts an image and uploads the results to the registry.
pub(super) fn publish(
    stage: &Stage<'_>,
    program: &Path,
    Draft { containers, start, layout, programs }: Draft<'_>,
) -> Result<Converted<Digest>> {
    let work = stage.context.work.join("nydus");
    let blobs = work.join("blobs");
    fs::create_dir_all(&blobs)?;
    let bootstrap = work.join("bootstrap");
    let mut merge = cmd!("{program} merge --bootstrap {bootstrap}");
    for blob in layers(layout)? {
        let folder = work.join("layer");
        fs::create_dir(&folder)?;
        run!(
            "tar --extract --gzip --numeric-owner --xattrs --xattrs-include=*",
            "--file {blob} --directory {folder}"
        )?;
        let before = names(&blobs)?;
        run!("{program} build --blob-dir {blobs} {folder}")?;
        remove(&folder)?;
        let made = names(&blobs)?.into_iter().find(|it| !before.contains(it));
        merge.arg(made.context("nydus build has made no blob")?);
    }
    quiet(&mut merge)?;
    let repository = repository(start);
    for blob in names(&blobs)? {
        send(&blob, &repository, &digest(&blob)?)?;
    }
    let plain = pack(&bootstrap, &repository)?;
    let mut optimized = Vec::new();
    for it in programs {
        let better = optimize(containers, start, program, &bootstrap, it)?;
        let before = names(&blobs)?;
        let place = containers.place();
        for blob in names(&place.join("blobs"))? {
            if !before.iter().any(|it| it.file_name() == blob.file_name()) {
                send(&blob, &repository, &digest(&blob)?)?;
            }
        }
        optimized.push((it.trace, pack(&better, &repository)?));
    }
    stage.context.set_aside("nydus")?;
    Ok(Converted { program: program.to_owned(), plain, optimized })
}

/// $1 nydus, $2 the bootstrap. Runs the program once from a mount of Nydus's FUSE, the only one that records reads.
const TRACE: &str = r#"
cd "$3"
NO_PROXY='*' "$1" fuse --bootstrap "$2" --config config.yml --mountpoint "$3/lower" --log-dir "$3/log" \
    --log-level warn --apiserver "unix://$3/api" > said 2>&1 &
echo $! > pid
until mountpoint -q lower && [ -S api ]; do kill -0 $!; sleep 0.01; done
"#;

/// Makes a bootstrap with a program's reads, and a blob of the data in the folder `blobs` of the run's folder.
fn optimize(
    containers: &Containers<'_>,
    start: &Start<'_>,
    nydus: &Path,
    bootstrap: &Path,
    program: &Program,
) -> Result<PathBuf> {
    containers.before(&["lower", "cache", "log", "blobs"])?;
    let place = containers.place();
    let text = config(start, &place.join("cache"), false);
    fs::write(place.join("config.yml"), text)?;
    quiet(&mut script(TRACE, &[nydus.as_ref(), bootstrap.as_ref(), place.as_ref()]))?;
    run_all(containers.run(&[place.join("lower")], program))?;
    let better = place.join("better");
    let mut optimize = cmd!(
        "{nydus} optimize --apiserver unix://{place}/api --parent-bootstrap {bootstrap}",
        "--bootstrap {better} --blob-dir {place}/blobs --config {place}/config.yml"
    );
    optimize.env("NO_PROXY", "*");
    quiet(&mut optimize)?;
    containers.after()?;
    end(&place.join("pid"))?;
    unmount_all(&place)?;
    Ok(better)
}

/// Compresses a bootstrap like the layer that contains it, uploads it, and returns its digest.
fn pack(bootstrap: &Path, repository: &str) -> Result<String> {
    run!("gzip --keep --force --no-name {bootstrap}")?;
    let packed = bootstrap.with_extension("gz");
    let digest = digest(&packed)?;
    send(&packed, repository, &digest)?;
    Ok(digest)
}

/// Paths of the complete blobs in a folder, each of which has a partial copy beside it.
fn names(folder: &Path) -> Result<Vec<PathBuf>> {
    let all: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    let all = all.into_iter().map(|it| it.path());
    Ok(all.filter(|it| it.extension().is_none()).collect())
}
