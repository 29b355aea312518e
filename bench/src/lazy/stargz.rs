//! stargz-snapshotter: eStargz layers, mounted by its library through FUSE.

use std::cell::RefCell;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Result, bail};
use serde_json::json;

use super::containers::{Containers, digest, script, send};
use super::{Converted, Draft, Stage, Start, Way};
use crate::command::{cmd, run_all};
use crate::mounts::unmount_all;
use crate::registry::layers;
use crate::samples::{Program, Sample};
use crate::service::Service;
use rig::process::quiet;

/// A layer in the registry.
pub(super) struct Layer {
    digest: String,
    /// Digest of the layer's table of contents.
    contents: String,
}

/// The layers of an image, the lowest first. If the image is optimized, they begin with the files that a program opens.
pub(super) type Layers = Vec<Layer>;

pub(super) struct Stargz<'a> {
    name: &'static str,
    containers: &'a Containers<'a>,
    converted: &'a Converted<Layers>,
    is_optimized: bool,
    service: RefCell<Option<Service>>,
}

impl<'a> Stargz<'a> {
    pub(super) const fn new(
        name: &'static str,
        containers: &'a Containers<'a>,
        converted: &'a Converted<Layers>,
        is_optimized: bool,
    ) -> Self {
        Self { name, containers, converted, is_optimized, service: RefCell::new(None) }
    }
}

impl Stargz<'_> {
    fn serve(&self, start: &Start<'_>) -> Result<()> {
        let mode = if self.is_optimized { "prefetch" } else { "none" };
        let scheme = start.certificate.map(|_| "https");
        let service = serve(self.containers, &self.converted.program, mode, scheme)?;
        self.service.replace(Some(service));
        Ok(())
    }
}

/// Requests mounts from the service, as containerd does for each layer.
const MOUNT: &str =
    r#"curl -sSf --unix-socket "$1/service/socket" --data-binary @"$1/request" http://service/"#;

impl Way for Stargz<'_> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn before_with(&self, start: &Start<'_>, prepare: &dyn Fn(&Path) -> Result<()>) -> Result<()> {
        self.containers.before(&["service"])?;
        prepare(&self.data())?;
        self.serve(start)
    }

    fn data(&self) -> PathBuf {
        self.containers.place().join("service")
    }

    fn again(&self, start: &Start<'_>) -> Result<()> {
        // The socket is left from the previous service.
        rig::cache::remove(&self.data().join("socket"))?;
        self.serve(start)?;
        run_all(self.mount(start))
    }

    fn is_prepared(&self) -> bool {
        self.is_optimized
    }

    fn mount(&self, start: &Start<'_>) -> Result<Vec<Command>> {
        let (mount, folders) = mount(self.containers, start, &self.converted.plain)?;
        Ok(vec![mount, self.containers.join(&folders)])
    }

    fn tree(&self) -> PathBuf {
        self.containers.place().join("root")
    }

    fn run(&self, start: &Start<'_>, program: &Program) -> Result<Vec<Command>> {
        let layers = self.converted.of(self.is_optimized, program)?;
        let (mount, folders) = mount(self.containers, start, layers)?;
        let run = self.containers.run(&folders, program)?;
        Ok(std::iter::once(mount).chain(run).collect())
    }

    fn after(&self) -> Result<()> {
        self.containers.after()?;
        unmount_all(&self.containers.place())?;
        self.service.take();
        Ok(())
    }
}

/// Returns the commands that mount layers, and the mount points, the uppermost first.
fn mount(
    containers: &Containers<'_>,
    start: &Start<'_>,
    layers: &[Layer],
) -> Result<(Command, Vec<PathBuf>)> {
    let place = containers.place();
    let mut folders = Vec::new();
    for number in 0..layers.len() {
        let folder = place.join(format!("layer-{number}"));
        fs::create_dir_all(&folder)?;
        folders.push(folder);
    }
    let wanted = layers.iter().zip(&folders).map(|(layer, folder)| {
        json!({ "digest": format!("sha256:{}", layer.digest), "toc": layer.contents, "folder": folder })
    });
    let reference = format!("{}/{}-stargz:1", start.host, start.sample.name);
    let request = json!({ "reference": reference, "layers": wanted.collect::<Vec<_>>() });
    fs::write(place.join("request"), request.to_string())?;
    folders.reverse();
    Ok((script(MOUNT, &[place.as_ref()]), folders))
}

/// Starts the service that replaces the snapshotter.
fn serve(
    containers: &Containers<'_>,
    program: &Path,
    mode: &str,
    scheme: Option<&str>,
) -> Result<Service> {
    let root = containers.place().join("service");
    let said = File::create(containers.place().join("said"))?;
    let mut command = Command::new(program);
    command.arg("serve").arg(&root).arg(mode).args(scheme).stdout(Stdio::null()).stderr(said);
    Service::start(command, "stargz", || Ok(root.join("socket").exists()))
}

/// Converts an image, once without and once with the order of each program's files, and uploads the layers to the
/// registry.
pub(super) fn publish(
    stage: &Stage<'_>,
    program: &Path,
    Draft { containers, start, layout, programs }: Draft<'_>,
) -> Result<Converted<Layers>> {
    let work = stage.context.work.join("stargz");
    fs::create_dir_all(&work)?;
    let convert = |first: &str| -> Result<Vec<Layer>> {
        let list = work.join("first");
        fs::write(&list, first)?;
        let convert = |blob: PathBuf| convert(program, start, &blob, &list, &work);
        layers(layout)?.into_iter().map(convert).collect()
    };
    let plain = convert("")?;
    let mut optimized = Vec::new();
    for it in programs {
        containers.before(&["service"])?;
        let service = serve(containers, program, "record", None)?;
        let (mut mount, folders) = mount(containers, start, &plain)?;
        quiet(&mut mount)?;
        run_all(containers.run(&folders, it))?;
        containers.after()?;
        unmount_all(&containers.place())?;
        drop(service);
        let said = fs::read_to_string(containers.place().join("said"))?;
        optimized.push((it.trace, convert(&recorded(&said)?)?));
    }
    stage.context.set_aside("stargz")?;
    Ok(Converted { program: program.to_owned(), plain, optimized })
}

/// The accessed files in the library's log, one per line.
fn recorded(said: &str) -> Result<String> {
    let names = said.lines().filter_map(|line| {
        let (_, name) = line.split_once("file accessed: /")?;
        Some(name.split_once('"')?.0.to_owned() + "\n")
    });
    let names: String = names.collect();
    if names.is_empty() {
        bail!("stargz has noted no file that was opened");
    }
    Ok(names)
}

fn convert(
    program: &Path,
    start: &Start<'_>,
    blob: &Path,
    first: &Path,
    work: &Path,
) -> Result<Layer> {
    let made = work.join("made");
    let mut convert = cmd!("{program} convert {blob} {first} {made}");
    // The conversion unpacks layers there temporarily.
    let contents = quiet(convert.env("TMPDIR", work))?.trim().to_owned();
    let digest = digest(&made)?;
    send(&made, &repository(start.host, start.sample), &digest)?;
    Ok(Layer { digest, contents })
}

fn repository(host: &str, sample: &Sample) -> String {
    format!("http://{host}/v2/{}-stargz", sample.name)
}
