//! `doctor`: the features of this host, and Quire's choices.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use container::runtime::Runtime;
use kernel::features::{Can, Cgroups, probe};
use kernel::mount::OVERLAY_VERITY;
use kernel::version::KernelVersion;
use serde::Serialize;
use store::{OpenOptions, Sharing, Store};

use crate::Answer;
use crate::args;
use crate::context::Context;
#[cfg(feature = "serve")]
use crate::engines::findings::{EngineReport, Expected};
use crate::report;

#[cfg_attr(
    not(feature = "serve"),
    expect(unused_variables, reason = "its options are about engines")
)]
pub(crate) fn doctor(context: &Context, args: &args::Doctor) -> anyhow::Result<Answer> {
    #[cfg(feature = "serve")]
    {
        let root = args.root.display();
        let found = std::fs::metadata(&args.root);
        let found = found.with_context(|| format!("cannot look below --root {root}"))?;
        anyhow::ensure!(found.is_dir(), "--root {root} is not a directory");
    }
    let store = context.store_directory()?;
    let directory = existing(&store);
    let opened = std::fs::File::open(&directory)
        .with_context(|| format!("cannot open {}", directory.display()))?;
    let features = probe(opened.as_fd(), context.who());
    let search = std::env::var_os("PATH").unwrap_or_default();
    let runtime = Runtime::find(&search, None, None);
    let runtime = match &runtime {
        Ok(runtime) if !runtime.works() => {
            format!("{}, which does not work: its `--version` fails", runtime.path.display())
        }
        Ok(runtime) => match runtime.obstacle() {
            Some(path) => format!(
                "{} (with {} covered in the container's own namespace)",
                runtime.path.display(),
                path.display()
            ),
            None => runtime.path.display().to_string(),
        },
        Err(error) => error.to_string(),
    };
    let old_runtimes = Runtime::all(&search).filter_map(|it| it.missing_fixes());
    let old_runtimes = old_runtimes.map(|it| it.to_string()).collect();
    let verification = match features.fs_verity.can {
        Can::Yes if KernelVersion::running() >= Some(OVERLAY_VERITY) => {
            "by the kernel at every read (fs-verity)"
        }
        _ => "at import, and by `quire verify`: reads are not checked",
    };
    let images = match (features.erofs_from_file.can, features.loop_devices.can) {
        (Can::Yes, _) => "mounted straight from their files",
        (_, Can::Yes) => "mounted through loop devices",
        _ => "cannot be mounted",
    };
    let writable = crate::wanted::describe_writable(context);
    let (form, why) = crate::forms::auto(opened.as_fd());
    let policy = crate::policy::describe(context);
    #[cfg(feature = "serve")]
    let settings = crate::settings::ServeFile::below(&args.root);
    #[cfg(feature = "serve")]
    let engines = engines(args, &settings, &store);
    let root = context.who().is_host_root();
    let opened = Store::open(&store, context.who(), OpenOptions::read()).ok();
    let exposed = opened.as_ref().and_then(|it| it.exposure().ok()).unwrap_or_default();
    let features_told = features.rows().map(|(name, feature)| FeatureReport {
        feature: name,
        can: word(feature.can),
        reason: feature.reason.clone(),
    });
    let told = DoctorReport {
        kernel: features.release,
        store: store.display().to_string(),
        exposed: report::texts(&exposed),
        shared: shared(context, opened.as_ref()),
        root,
        without_root: crate::rootless::describe(context.outside()),
        labels: crate::security::describe_labels(context),
        cgroups: features.cgroups.to_string(),
        features: features_told.into(),
        runtime,
        old_runtimes,
        policy,
        #[cfg(feature = "serve")]
        serve: settings.lazy(),
        #[cfg(feature = "serve")]
        snapshotter: settings.snapshotter(),
        #[cfg(feature = "serve")]
        mounts: settings.mounts(),
        #[cfg(feature = "serve")]
        engines,
        choices: ChoicesReport {
            verification,
            images,
            form: format!("{form}: {why}"),
            writable,
            network: crate::network::describe(),
            direct: DIRECT,
        },
    };
    if context.json {
        report::json(&told)?;
    } else {
        told.print(features.cgroups)?;
    }
    Ok(Answer::Yes)
}

/// Whether the store is shared, and who shares one with this user.
fn shared(context: &Context, own: Option<&Store>) -> Vec<String> {
    let is_shared = own.is_some_and(|it| it.sharing().is_ok_and(|it| it == Sharing::All));
    let own =
        is_shared.then(|| "with all users of this host, who can read all of its images".to_owned());
    let others = context.shared().iter().map(|it| format!("{} is, with you", it.path().display()));
    let who = context.outside();
    let refused = if who.is_host_root() { None } else { crate::context::refusal_of_roots(who) };
    own.into_iter().chain(others).chain(refused).collect()
}

/// What is wrong with the configuration of engines.
#[cfg(feature = "serve")]
fn engines(
    args: &args::Doctor,
    settings: &crate::settings::ServeFile,
    store: &Path,
) -> Vec<EngineReport> {
    // What is wrong with the settings is told elsewhere.
    let set = settings.load().unwrap_or_default().snapshotter;
    let service = &crate::settings::SnapshotterChoices::as_set(set);
    crate::engines::findings::engines(&Expected { service, store, root: &args.root })
}

/// Report of `doctor --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DoctorReport {
    /// Release of the kernel.
    kernel: String,
    /// Directory of the store.
    store: String,
    /// Paths of the store that other users can change, with the reason.
    exposed: Vec<String>,
    /// Who shares this store, or another one with the caller.
    shared: Vec<String>,
    /// Whether the caller is root, as `mount` needs.
    root: bool,
    /// Whether users who are not root can run containers, or why not.
    without_root: String,
    /// What AppArmor and SELinux do for containers.
    labels: String,
    /// Version of control groups: `v1`, `hybrid`, `v2` or `absent`.
    cgroups: String,
    /// Features of the kernel.
    features: Vec<FeatureReport>,
    /// Path of the runtime, or why there is none.
    runtime: String,
    /// Runtimes that are older than known security fixes, with the fixes.
    old_runtimes: Vec<String>,
    /// The policy in force.
    policy: String,
    /// The settings of `serve --lazy`.
    #[cfg(feature = "serve")]
    serve: String,
    /// The settings of `serve --snapshotter`.
    #[cfg(feature = "serve")]
    snapshotter: String,
    /// The settings of `serve --mounts`.
    #[cfg(feature = "serve")]
    mounts: String,
    /// Engines that have a configuration.
    #[cfg(feature = "serve")]
    engines: Vec<EngineReport>,
    /// Choices that Quire would make.
    choices: ChoicesReport,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct FeatureReport {
    /// Name of the feature.
    feature: &'static str,
    /// `yes`, `no`, or `unknown` if it could not be tried.
    can: &'static str,
    /// Reason for the answer.
    reason: String,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ChoicesReport {
    /// How reads are verified.
    verification: &'static str,
    /// How images are mounted.
    images: &'static str,
    /// Form of new images, and why.
    form: String,
    /// Place for the changes to a root.
    writable: String,
    /// Networks that a container can have, besides none and the host's.
    network: String,
    /// Whether files can be read with `O_DIRECT`.
    #[serde(rename = "O_DIRECT")]
    direct: &'static str,
}

impl DoctorReport {
    fn print(&self, mounted: Cgroups) -> anyhow::Result<()> {
        let mut out = report::standard_output();
        writeln!(out, "kernel         {}", self.kernel)?;
        writeln!(out, "cgroups        {}", cgroups(mounted))?;
        writeln!(out, "store          {}", self.store)?;
        for shared in &self.shared {
            writeln!(out, "shared         {shared}")?;
        }
        for exposure in &self.exposed {
            writeln!(out, "exposed        {exposure}")?;
        }
        let user = if self.root { "root" } else { "not root" };
        writeln!(out, "user           {user}")?;
        writeln!(out, "without root   {}", self.without_root)?;
        writeln!(out, "labels         {}", self.labels)?;
        writeln!(out, "runtime        {}", self.runtime)?;
        for old in &self.old_runtimes {
            writeln!(out, "old runtime    {old}")?;
        }
        writeln!(out, "policy         {}", self.policy)?;
        #[cfg(feature = "serve")]
        writeln!(out, "lazy service   {}", self.serve)?;
        #[cfg(feature = "serve")]
        writeln!(out, "snapshotter    {}", self.snapshotter)?;
        #[cfg(feature = "serve")]
        writeln!(out, "mounts         {}", self.mounts)?;
        #[cfg(feature = "serve")]
        for engine in &self.engines {
            engine.print(&mut out)?;
        }
        let ChoicesReport { verification, images, form, writable, network, direct } = &self.choices;
        writeln!(out, "verification   {verification}")?;
        writeln!(out, "images         {images}")?;
        writeln!(out, "form           {form}")?;
        writeln!(out, "writable       {writable}")?;
        writeln!(out, "network        {network}")?;
        writeln!(out, "O_DIRECT       {direct}\n")?;
        for FeatureReport { feature, can, reason } in &self.features {
            writeln!(out, "{can:<8} {feature}: {reason}")?;
        }
        out.flush()?;
        Ok(())
    }
}

/// EROFS that reads from files has no direct I/O.
const DIRECT: &str = "fails (EINVAL) on files of the forms packed and tar unless `--io loop` is given; works on those of the form \
                      objects";

const fn word(can: Can) -> &'static str {
    match can {
        Can::Yes => "yes",
        Can::No => "no",
        Can::Unknown => "unknown",
    }
}

const fn cgroups(found: Cgroups) -> &'static str {
    match found {
        Cgroups::V1 => "version 1",
        Cgroups::Hybrid => "version 1, with version 2 beside it",
        Cgroups::V2 => "version 2",
        Cgroups::Absent => "not mounted on /sys/fs/cgroup",
    }
}

/// The path, or the nearest directory above it that is there: where the store would be.
fn existing(path: &Path) -> PathBuf {
    let found = path.ancestors().find(|it| it.is_dir());
    found.map_or_else(|| PathBuf::from("/"), Path::to_path_buf)
}
