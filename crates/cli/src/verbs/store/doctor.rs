//! `doctor`: shows the features of this host, and Quire's choices.

use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use container::runtime::Runtime;
use kernel::features::{Can, Cgroups, probe};
use kernel::mount::OVERLAY_VERITY;
use kernel::version::KernelVersion;
use serde::Serialize;
use store::{OpenOptions, Sharing, Store};

use crate::Answer;
use crate::output::report;
use crate::session::context::Context;
use crate::verbs::VerbArgs;
#[cfg(feature = "serve")]
use crate::verbs::services::engines::findings::{EngineReport, Expected};

#[derive(Debug, Args)]
pub(crate) struct Doctor {
    /// Look for the configuration of engines below this directory, such as the mounted root of another machine
    #[cfg(feature = "serve")]
    #[arg(long, value_name = "DIR", default_value = "/")]
    pub(crate) root: PathBuf,
}

impl VerbArgs for Doctor {
    const NAME: &'static str = "doctor";
    const ABOUT: &'static str = "Show the features of this host, and Quire's default choices";
    const EXAMPLES: &'static str = "quire doctor\n  quire doctor --json";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        doctor(context, self)
    }
}

#[cfg_attr(not(feature = "serve"), expect(unused_variables, reason = "it has options for engines"))]
pub(crate) fn doctor(context: &Context, args: &Doctor) -> anyhow::Result<Answer> {
    #[cfg(feature = "serve")]
    {
        let root = args.root.display();
        let found = std::fs::metadata(&args.root);
        let found = found.with_context(|| format!("cannot examine --root {root}"))?;
        anyhow::ensure!(found.is_dir(), "--root {root} is not a directory");
    }
    let store = context.store_directory()?;
    let directory = existing(&store);
    let folder = std::fs::File::open(&directory)
        .with_context(|| format!("cannot open {}", directory.display()))?;
    let features = probe(folder.as_fd(), context.who());
    let search = std::env::var_os("PATH").unwrap_or_default();
    let runtime = Runtime::locate(&search, None, None);
    let runtime = match &runtime {
        Ok(runtime) if !runtime.works() => {
            Err(format!("{}, which does not work: its `--version` fails", runtime.path.display()))
        }
        Ok(runtime) => Ok(match runtime.obstacle() {
            Some(path) => format!(
                "{} (with {} covered in the container's own namespace)",
                runtime.path.display(),
                path.display()
            ),
            None => runtime.path.display().to_string(),
        }),
        Err(error) => Err(error.to_string()),
    };
    let old_runtimes = Runtime::all(&search).filter_map(|it| it.missing_fixes());
    let old_runtimes: Vec<_> = old_runtimes.map(|it| it.to_string()).collect();
    let verification = match features.fs_verity.can {
        Can::Yes if KernelVersion::running() >= Some(OVERLAY_VERITY) => {
            "by the kernel at every read (fs-verity)"
        }
        _ => "at import, and by `quire verify`: the kernel does not check reads",
    };
    let images = match (features.erofs_from_file.can, features.loop_devices.can) {
        (Can::Yes, _) => Ok("mounted straight from their files"),
        (_, Can::Yes) => Ok("mounted through loop devices"),
        // Users who are not root have trees and FUSE.
        _ if !context.who().is_host_root() => Ok("mountable only by root"),
        _ => Err("cannot be mounted"),
    };
    let writable = crate::verbs::containers::container_options::describe_writable(context);
    let policy = crate::session::policy::describe(context);
    #[cfg(feature = "serve")]
    let settings = crate::verbs::services::service_config::ServeFile::below(&args.root);
    #[cfg(feature = "serve")]
    let engines = engines(args, &settings, &store);
    let root = context.who().is_host_root();
    let opened = Store::open(&store, context.who(), OpenOptions::read()).ok();
    let (form, why) = crate::session::forms::auto(folder.as_fd(), opened.as_ref());
    let exposed = opened.as_ref().and_then(|it| it.exposure().ok()).unwrap_or_default();
    let exposed = report::texts(&exposed);
    let without_root =
        crate::session::own_namespace::describe(context.outside(), &features.user_namespaces);
    let shared = shared(context, opened.as_ref());
    let labels = crate::verbs::containers::security::describe_labels(context);
    let network = crate::verbs::containers::networks::connect::describe();
    let form = format!("{form}: {why}");

    let mut rows = Rows::default();
    rows.tell("kernel", &features.release);
    rows.tell("cgroups", cgroups(features.cgroups));
    rows.tell("store", &store.display().to_string());
    shared.iter().for_each(|it| rows.tell("shared", it));
    exposed.iter().for_each(|it| rows.warn("exposed", it));
    rows.tell("user", if root { "root" } else { "not root" });
    match root {
        // For root this is only information, because it concerns other users.
        true => rows.tell("without root", either(&without_root)),
        false => rows.check("without root", &without_root),
    }
    rows.tell("labels", &labels);
    rows.check("runtime", &runtime);
    old_runtimes.iter().for_each(|it| rows.warn("old runtime", it));
    rows.check("policy", &policy);
    #[cfg(feature = "serve")]
    let (serve, snapshotter, mounts) = (settings.lazy(), settings.snapshotter(), settings.mounts());
    #[cfg(feature = "serve")]
    {
        rows.check("lazy service", &serve);
        rows.check("snapshotter", &snapshotter);
        rows.check("mounts", &mounts);
        for engine in &engines {
            match engine.works() {
                Some(true) => rows.check::<String>("engine", &Ok(engine.text())),
                Some(false) => rows.check::<String>("engine", &Err(engine.text())),
                None => rows.tell("engine", &engine.text()),
            }
        }
    }
    rows.tell("verification", verification);
    rows.check("images", &images);
    rows.tell("form", &form);
    rows.tell("writable", &writable);
    rows.tell("network", &network);
    rows.tell("O_DIRECT", DIRECT);
    rows.tell("sendfile", SENDFILE);

    let features_told = features.rows().map(|(name, feature)| FeatureReport {
        feature: name,
        can: word(feature.can),
        reason: feature.reason.clone(),
    });
    let told = DoctorReport {
        works: rows.problems.is_empty(),
        problems: rows.problems.clone(),
        warnings: rows.warnings.clone(),
        kernel: features.release,
        store: store.display().to_string(),
        exposed,
        shared,
        root,
        without_root: either(&without_root).to_owned(),
        labels,
        cgroups: features.cgroups.to_string(),
        features: features_told.into(),
        runtime: either(&runtime).to_owned(),
        old_runtimes,
        policy: either(&policy).to_owned(),
        #[cfg(feature = "serve")]
        serve: either(&serve).to_owned(),
        #[cfg(feature = "serve")]
        snapshotter: either(&snapshotter).to_owned(),
        #[cfg(feature = "serve")]
        mounts: either(&mounts).to_owned(),
        #[cfg(feature = "serve")]
        engines,
        choices: ChoicesReport {
            verification,
            images: images.unwrap_or_else(|why| why),
            form,
            writable,
            network,
            direct: DIRECT,
            sendfile: SENDFILE,
        },
    };
    if context.json {
        report::json(&told)?;
    } else {
        told.print(&rows)?;
    }
    Ok(Answer::Yes)
}

/// Returns the text of a result or of its error.
fn either<T: AsRef<str>>(answer: &Result<T, T>) -> &str {
    match answer {
        Ok(text) | Err(text) => text.as_ref(),
    }
}

/// The rows for people, in order: a mark, a name and a text.
#[derive(Default)]
struct Rows {
    rows: Vec<(&'static str, &'static str, String)>,
    /// Names of rows about features that do not work.
    problems: Vec<&'static str>,
    /// Names of rows about features that work but need attention.
    warnings: Vec<&'static str>,
}

impl Rows {
    fn tell(&mut self, name: &'static str, text: &str) {
        self.rows.push((" ", name, text.to_owned()));
    }

    fn warn(&mut self, name: &'static str, text: &str) {
        self.rows.push(("!", name, text.to_owned()));
        if !self.warnings.contains(&name) {
            self.warnings.push(name);
        }
    }

    fn check<T: AsRef<str>>(&mut self, name: &'static str, answer: &Result<T, T>) {
        let mark = mark(if answer.is_ok() { Can::Yes } else { Can::No });
        self.rows.push((mark, name, either(answer).to_owned()));
        if answer.is_err() && !self.problems.contains(&name) {
            self.problems.push(name);
        }
    }

    /// Returns the last line.
    fn verdict(&self, absent: &[&str]) -> String {
        let lists = [("warnings", &self.warnings[..]), ("missing on this host", absent)];
        let lists = lists.into_iter().filter(|(_, names)| !names.is_empty());
        let also: String =
            lists.map(|(what, names)| format!("; {what}: {}", names.join(", "))).collect();
        match &self.problems[..] {
            [] => format!("{} all configured features work{also}", mark(Can::Yes)),
            some => {
                format!(
                    "{} some features do not work: see {}{also}",
                    mark(Can::No),
                    some.join(", ")
                )
            }
        }
    }
}

/// Describes whether the store is shared, and which stores others share with this user.
fn shared(context: &Context, own: Option<&Store>) -> Vec<String> {
    let is_shared = own.is_some_and(|it| it.sharing().is_ok_and(|it| it == Sharing::All));
    let own =
        is_shared.then(|| "with all users of this host, who can read all of its images".to_owned());
    let others = context.shared().iter().map(|it| format!("{} (with you)", it.path().display()));
    let who = context.outside();
    let refused =
        if who.is_host_root() { None } else { crate::session::context::refusal_of_roots(who) };
    own.into_iter().chain(others).chain(refused).collect()
}

/// Returns the problems in the configuration of engines.
#[cfg(feature = "serve")]
fn engines(
    args: &Doctor,
    settings: &crate::verbs::services::service_config::ServeFile,
    store: &Path,
) -> Vec<EngineReport> {
    // Errors in the settings are reported in their own rows.
    let set = settings.load().unwrap_or_default().snapshotter;
    let service = &crate::verbs::services::service_config::SnapshotterChoices::as_set(set);
    crate::verbs::services::engines::findings::engines(&Expected {
        service,
        store,
        root: &args.root,
    })
}

/// Report of `doctor --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct DoctorReport {
    /// Whether everything works that is set up on this host.
    works: bool,
    /// Names of the rows, in the output for people, about features that do not work.
    problems: Vec<&'static str>,
    /// Names of the rows about features that work but should be looked at, such as old runtimes.
    warnings: Vec<&'static str>,
    /// Release of the kernel.
    kernel: String,
    /// Directory of the store.
    store: String,
    /// Paths of the store that other users can change, with the reason.
    exposed: Vec<String>,
    /// Whether this store is shared, and which stores others share with the caller.
    shared: Vec<String>,
    /// Whether the caller is root, as `mount` needs.
    root: bool,
    /// Whether users who are not root can run containers, or the reason why they cannot.
    without_root: String,
    /// Effect of AppArmor and SELinux on containers.
    labels: String,
    /// Version of control groups: `v1`, `hybrid`, `v2` or `absent`.
    cgroups: String,
    /// Features of the kernel.
    features: Vec<FeatureReport>,
    /// Path of the runtime, or the reason why there is none.
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
    /// Form of new images, with the reason.
    form: String,
    /// Place for the changes to a root.
    writable: String,
    /// Networks that a container can have, besides none and the host's.
    network: String,
    /// Whether files can be read with `O_DIRECT`.
    #[serde(rename = "O_DIRECT")]
    direct: &'static str,
    /// Which reads share the page cache between images of the forms `packed` and `tar`.
    sendfile: &'static str,
}

impl DoctorReport {
    fn print(&self, rows: &Rows) -> anyhow::Result<()> {
        let mut out = report::standard_output();
        for (mark, name, text) in &rows.rows {
            let mut lines = text.split('\n');
            writeln!(out, "{mark} {name:<14} {}", report::plain(lines.next().unwrap_or_default()))?;
            for line in lines {
                writeln!(out, "  {:14} {}", "", report::plain(line))?;
            }
        }
        writeln!(out)?;
        let features = self.features.iter();
        for FeatureReport { feature, can, reason } in features {
            let mark = [Can::Yes, Can::No].into_iter().find(|it| word(*it) == *can);
            writeln!(out, "{} {feature}: {reason}", mark.map_or("?", self::mark))?;
        }
        let absent = self.features.iter().filter(|it| it.can == word(Can::No));
        let absent: Vec<_> = absent.map(|it| it.feature).collect();
        writeln!(out, "\n{}", rows.verdict(&absent))?;
        out.flush()?;
        Ok(())
    }
}

/// An EROFS mounted from a file has no direct I/O.
const DIRECT: &str = "fails (EINVAL) on files of the forms packed and tar unless `--io loop` is given; works on those of the form \
                      objects";

/// Linux 7.0 shares pages between EROFS mounts for read(2) and mmap(2), but not for splice(2), which sendfile(2)
/// uses. Measured on 7.2: two images of nginx take 165 MB with read, and 286 MB with sendfile, as without sharing.
const SENDFILE: &str = "fills the page cache for each mount of the forms packed and tar; read and mmap share it from Linux 7.0, \
                        and images of the form objects share it in any case";

const fn mark(can: Can) -> &'static str {
    match can {
        Can::Yes => "✓",
        Can::No => "✗",
        Can::Unknown => "?",
    }
}

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
        Cgroups::Hybrid => "version 1, and version 2 as well",
        Cgroups::V2 => "version 2",
        Cgroups::Absent => "not mounted on /sys/fs/cgroup",
    }
}

/// Returns the path, or its nearest existing parent directory, in which the store would be made.
fn existing(path: &Path) -> PathBuf {
    let found = path.ancestors().find(|it| it.is_dir());
    found.map_or_else(|| PathBuf::from("/"), Path::to_path_buf)
}
