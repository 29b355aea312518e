//! `/etc/quire/serve.toml`: the settings of services.

mod mounts;

use std::io::{ErrorKind, Read as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
pub(crate) use mounts::{COPIES, MountsSettings};
use serve::lazy::NO_TRACE;
use serve::metrics::MetricsAddress;
use store::check_trace_name;
use toml::Spanned;
use toml::de::{DeString, DeValue};

use crate::args;
use crate::session::settings::settings_file::{FILE_MAX, SettingsFile};
use crate::verbs::services::rootfs::regular;

/// The administrator's file, which may be missing.
const SYSTEM: &str = "/etc/quire/serve.toml";
/// All keys of a settings file.
const KEYS: &str =
    "lazy-timeout, prefetch, complete, complete-after and the tables [snapshotter] and [mounts]";
/// All keys of the table for the snapshotter.
const SNAPSHOTTER_KEYS: &str = "socket, engine, instance, skip, lazy, trust-index, image-service, gc-above, metrics \
    and metrics-remote";

/// The settings in a file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServeSettings {
    /// Timeout of a read without data from any source, in seconds; 0 means no limit.
    pub(crate) lazy_timeout: Option<u32>,
    /// Trace that is prefetched for mounts that do not name one.
    pub(crate) prefetch: Option<String>,
    /// Whether each image is fetched completely.
    pub(crate) complete: Option<bool>,
    /// When an image that is in use is fetched completely.
    pub(crate) complete_after: Option<CompleteAfter>,
    /// The table `[snapshotter]`.
    pub(crate) snapshotter: SnapshotterSettings,
    /// The table `[mounts]`.
    pub(crate) mounts: MountsSettings,
}

/// When an image that is in use is fetched completely.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CompleteAfter {
    Never,
    Seconds(u32),
}

impl std::fmt::Display for CompleteAfter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Never => write!(f, "never"),
            Self::Seconds(seconds) => write!(f, "{seconds}"),
        }
    }
}

/// The settings in a file for `serve --snapshotter`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SnapshotterSettings {
    /// Socket of the service.
    pub(crate) socket: Option<PathBuf>,
    /// Socket of the engine.
    pub(crate) engine: Option<PathBuf>,
    /// Name of the engine's instance.
    pub(crate) instance: Option<String>,
    /// When the engine may skip a layer.
    pub(crate) skip: Option<args::Skip>,
    /// Whether images start before their layers are downloaded.
    pub(crate) lazy: Option<bool>,
    /// Whether unsigned indexes are used.
    pub(crate) trust_repository: Option<bool>,
    /// Socket of the engine's image service for kubelet.
    pub(crate) image_service: Option<PathBuf>,
    /// Disk usage in percent above which space is freed without a pause.
    pub(crate) gc_above: Option<u8>,
    /// Where metrics are served.
    pub(crate) metrics: Option<MetricsAddress>,
    /// Whether other hosts may reach that address.
    pub(crate) metrics_remote: Option<bool>,
}

/// Default socket of the service.
const SOCKET: &str = "/run/quire/snapshotter.sock";
/// Default socket of containerd.
pub(crate) const ENGINE: &str = "/run/containerd/containerd.sock";
/// Socket of the containerd of k3s.
pub(crate) const K3S_SOCKET: &str = "/run/k3s/containerd/containerd.sock";
/// Default of `gc-above`, in percent of the disk: below 85, at which kubelet begins to remove images.
const GC_ABOVE: u8 = 80;
/// Default name of the instance.
const INSTANCE: &str = "containerd";

/// The settings in force: from options, else from the file, else the defaults.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct SnapshotterChoices {
    pub(crate) socket: PathBuf,
    pub(crate) engine: PathBuf,
    pub(crate) instance: String,
    pub(crate) skip: args::Skip,
    pub(crate) lazy: bool,
    pub(crate) trust_repository: bool,
    pub(crate) image_service: Option<PathBuf>,
    pub(crate) gc_above: u8,
    pub(crate) metrics: Option<MetricsAddress>,
}

impl SnapshotterChoices {
    pub(crate) fn from_args(
        args: &crate::verbs::services::serve::args::Serve,
    ) -> anyhow::Result<Self> {
        let settings = ServeFile::new(args.config.as_deref());
        let file = settings.load()?.snapshotter;
        let path = settings.path.display();
        // An address on the command line has its own permission.
        let (metrics, metrics_remote) = match &args.metrics {
            Some(address) => (Some(address.clone()), Some(args.metrics_remote)),
            None => (file.metrics, file.metrics_remote),
        };
        let set = SnapshotterSettings {
            socket: args.socket.clone().or(file.socket),
            engine: args.engine.clone().or(file.engine),
            instance: args.instance.clone().or(file.instance),
            skip: args.skip.or(file.skip),
            gc_above: args.gc_above.or(file.gc_above),
            metrics,
            metrics_remote,
            ..file
        };
        check_metrics(&set).with_context(|| match args.metrics {
            Some(_) => "--metrics".to_owned(),
            None => path.to_string(),
        })?;
        let choices = Self::as_set(set);
        if choices.lazy && choices.skip != args::Skip::Download {
            bail!(
                "{path}: lazy = true below [snapshotter] needs skip = \"download\" as well: \
                otherwise the engine downloads each layer"
            );
        }
        if choices.image_service.as_ref() == Some(&choices.socket) {
            bail!(
                "{path}: image-service = \"{0}\" is the service's own socket, which the engine \
                uses: choose another one for kubelet",
                choices.socket.display()
            );
        }
        Ok(choices)
    }

    /// Returns the settings of a file, with defaults for those that are missing.
    pub(crate) fn as_set(set: SnapshotterSettings) -> Self {
        Self {
            socket: set.socket.unwrap_or_else(|| SOCKET.into()),
            engine: set.engine.unwrap_or_else(|| ENGINE.into()),
            instance: set.instance.unwrap_or_else(|| INSTANCE.to_owned()),
            skip: set.skip.unwrap_or(args::Skip::Unpack),
            lazy: set.lazy.unwrap_or_default(),
            trust_repository: set.trust_repository.unwrap_or_default(),
            image_service: set.image_service,
            gc_above: set.gc_above.unwrap_or(GC_ABOVE),
            metrics: set.metrics,
        }
    }
}

/// Refuses an address that other hosts reach, unless the settings allow it.
fn check_metrics(set: &SnapshotterSettings) -> anyhow::Result<()> {
    let is_remote = set.metrics_remote.unwrap_or_default();
    match &set.metrics {
        Some(address) if !address.is_local() && !is_remote => bail!(
            "other hosts reach {address}, without a password or encryption: use an address such as \
            127.0.0.1:9110, or allow it by metrics-remote = true (`--metrics-remote`)"
        ),
        None if is_remote => bail!(
            "metrics-remote = true needs an address: write metrics = \"0.0.0.0:9110\" as well"
        ),
        _ => Ok(()),
    }
}

/// The file from which settings are read, and read again.
#[derive(Debug, Clone)]
pub(crate) struct ServeFile {
    path: PathBuf,
    /// Root directory of another machine, which symlinks cannot leave; `None` for this machine.
    root: Option<PathBuf>,
    /// Whether a user named the file, so that a missing file is an error.
    is_named: bool,
}

impl ServeFile {
    /// Returns the named file, or the administrator's.
    pub(crate) fn new(named: Option<&Path>) -> Self {
        let path = named.unwrap_or(Path::new(SYSTEM)).to_owned();
        Self { path, root: None, is_named: named.is_some() }
    }

    /// Returns the administrator's file of the host with this root directory.
    pub(crate) fn below(root: &Path) -> Self {
        let path = root.join(SYSTEM.trim_start_matches('/'));
        Self { path, root: Some(root.to_owned()), is_named: false }
    }

    /// Reads the settings. A missing file counts as empty, unless a user named it.
    pub(crate) fn load(&self) -> anyhow::Result<ServeSettings> {
        Ok(self.read()?.unwrap_or_default())
    }

    /// Reads the file; returns `None` if it is missing and may be.
    fn read(&self) -> anyhow::Result<Option<ServeSettings>> {
        let path = self.path.display();
        let read = || match &self.root {
            None => String::from_utf8(oci::files::read_settings(&self.path, FILE_MAX)?)
                .map_err(|error| std::io::Error::new(ErrorKind::InvalidData, error)),
            Some(root) => {
                let mut text = String::new();
                regular(root, Path::new(SYSTEM))?.read_to_string(&mut text).map(|_| text)
            }
        };
        match read() {
            Ok(text) => Ok(Some(parse(&text, &path.to_string())?)),
            Err(error) if error.kind() == ErrorKind::NotFound && !self.is_named => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {path}")),
        }
    }

    /// Describes the settings for `serve --lazy` in one line for people.
    pub(crate) fn lazy(&self) -> Result<String, String> {
        self.describe(
            "--lazy",
            |_| Ok(()),
            |settings| {
                let ServeSettings { lazy_timeout, prefetch, complete, complete_after, .. } =
                    settings;
                [
                    lazy_timeout.map(|it| format!("lazy-timeout {it}")),
                    prefetch.map(|it| format!("prefetch {it}")),
                    complete.map(|it| format!("complete {it}")),
                    complete_after.map(|it| format!("complete-after {it}")),
                ]
            },
        )
    }

    /// Describes the settings for `serve --snapshotter` in one line for people.
    pub(crate) fn snapshotter(&self) -> Result<String, String> {
        let check = |settings: &ServeSettings| check_metrics(&settings.snapshotter);
        self.describe("--snapshotter", check, |settings| {
            let SnapshotterSettings {
                socket,
                engine,
                instance,
                skip,
                lazy,
                trust_repository,
                image_service,
                gc_above,
                metrics,
                metrics_remote,
            } = settings.snapshotter;
            [
                socket.map(|it| format!("socket {}", it.display())),
                engine.map(|it| format!("engine {}", it.display())),
                instance.map(|it| format!("instance {it}")),
                skip.map(|it| format!("skip {}", it.name())),
                lazy.map(|it| format!("lazy {it}")),
                trust_repository.filter(|it| *it).map(|_| {
                    "trust-index repository: everyone who can push to a repository controls what \
                    other images of the engine get for layers of the same name"
                        .to_owned()
                }),
                image_service.map(|it| format!("image-service {}", it.display())),
                gc_above.map(|it| format!("gc-above {it}")),
                metrics.map(|it| format!("metrics {it}")),
                metrics_remote.map(|it| format!("metrics-remote {it}")),
            ]
        })
    }

    /// Describes the settings for `serve --mounts` in one line for people.
    pub(crate) fn mounts(&self) -> Result<String, String> {
        self.describe("--mounts", |_| Ok(()), |settings| settings.mounts.told())
    }

    fn describe<const N: usize>(
        &self,
        option: &str,
        check: impl FnOnce(&ServeSettings) -> anyhow::Result<()>,
        told: impl FnOnce(ServeSettings) -> [Option<String>; N],
    ) -> Result<String, String> {
        let path = self.path.display();
        let checked = |settings: ServeSettings| -> anyhow::Result<ServeSettings> {
            check(&settings).with_context(|| path.to_string())?;
            Ok(settings)
        };
        let settings = match self.read().and_then(|it| it.map(checked).transpose()) {
            Ok(Some(settings)) => settings,
            Ok(None) => return Ok(format!("defaults ({path} does not exist)")),
            Err(error) => return Err(format!("`quire serve {option}` does not start: {error:#}")),
        };
        let set: Vec<_> = told(settings).into_iter().flatten().collect();
        let set = if set.is_empty() { "no settings".to_owned() } else { set.join(", ") };
        Ok(format!("{path}: {set}"))
    }
}

/// Parses settings. Each error names the line of `path`, the key, and the expected value.
fn parse(text: &str, path: &str) -> anyhow::Result<ServeSettings> {
    let file = SettingsFile::parse(text, path, "complete = true")?;
    let mut settings = ServeSettings::default();
    for (key, value) in file.table() {
        let place = file.place(key);
        let name = &key.get_ref()[..];
        if !matches!(name, "snapshotter" | "mounts") {
            set(&mut settings, key, value).with_context(|| place)?;
            continue;
        }
        let table = value.get_ref().as_table();
        let table = table
            .with_context(|| format!("{name} is not a table: write [{name}] above its settings"));
        for (key, value) in table.with_context(|| place)? {
            let done = match name {
                "mounts" => mounts::set(&mut settings.mounts, key, value),
                _ => set_snapshotter(&mut settings.snapshotter, key, value),
            };
            done.with_context(|| file.place(key))?;
        }
    }
    Ok(settings)
}

/// Returns a value as a number of seconds.
fn seconds_of(value: &DeValue<'_>) -> Option<u32> {
    value.as_integer().filter(|it| it.radix() == 10)?.as_str().parse().ok()
}

fn set(
    settings: &mut ServeSettings,
    key: &Spanned<DeString<'_>>,
    value: &Spanned<DeValue<'_>>,
) -> anyhow::Result<()> {
    let value = value.get_ref();
    match &key.get_ref()[..] {
        "lazy-timeout" => {
            let Some(seconds) = seconds_of(value) else {
                bail!(
                    "lazy-timeout is not a number of seconds: write lazy-timeout = 60, or 0 for \
                    no limit"
                );
            };
            settings.lazy_timeout = Some(seconds);
        }
        "prefetch" => {
            let Some(name) = value.as_str() else {
                bail!("prefetch is not a string: write prefetch = \"default\", or \"{NO_TRACE}\"");
            };
            check_trace_name(name).context("prefetch")?;
            settings.prefetch = Some(name.to_owned());
        }
        "complete" => {
            let complete = value.as_bool();
            settings.complete = Some(complete.context("complete is neither true nor false")?);
        }
        "complete-after" => {
            let after = match value.as_str() {
                Some("never") => Some(CompleteAfter::Never),
                _ => seconds_of(value).map(CompleteAfter::Seconds),
            };
            settings.complete_after = Some(after.context(
                "complete-after is neither a number of seconds nor \"never\": write complete-after = 10",
            )?);
        }
        "mirrors" | "mirror" | "registry" | "registries" | "host" => {
            bail!(
                "\"{}\" is not a setting: mirrors are in /etc/quire/certs.d/HOST/hosts.toml",
                key.get_ref()
            )
        }
        key @ ("trust" | "trust-index") => bail!(
            "\"{key}\" is not a setting: a pull decides which indexes are trusted: `quire pull \
            --lazy --trust-index`, and signatures by policy.json"
        ),
        "cache" => bail!(
            "\"cache\" is not a setting: the store keeps fetched data until `quire rm` and `quire \
            gc`"
        ),
        key => bail!("\"{}\" is not a setting: use {KEYS}", key.escape_debug()),
    }
    Ok(())
}

fn set_snapshotter(
    settings: &mut SnapshotterSettings,
    key: &Spanned<DeString<'_>>,
    value: &Spanned<DeValue<'_>>,
) -> anyhow::Result<()> {
    let text = value.get_ref().as_str();
    let path = |key: &str| {
        let path = text.map(Path::new).filter(|it| it.is_absolute());
        let path = path
            .with_context(|| format!("{key} is not an absolute path: write {key} = \"/run/…\""));
        path.map(Path::to_owned)
    };
    match &key.get_ref()[..] {
        "socket" => settings.socket = Some(path("socket")?),
        "engine" => settings.engine = Some(path("engine")?),
        "image-service" => settings.image_service = Some(path("image-service")?),
        "instance" => {
            let name = text.context("instance is not a string: write instance = \"containerd\"")?;
            settings.instance = Some(name.to_owned());
        }
        "skip" => {
            let Some(Ok(skip)) = text.map(|it| args::Skip::from_str(it, false)) else {
                bail!("skip is none of \"download\", \"unpack\" and \"never\"");
            };
            settings.skip = Some(skip);
        }
        "lazy" => {
            let lazy = value.get_ref().as_bool();
            settings.lazy = Some(lazy.context("lazy is neither true nor false")?);
        }
        "gc-above" => {
            let percent = value.get_ref().as_integer().filter(|it| it.radix() == 10);
            let percent = percent.and_then(|it| it.as_str().parse().ok());
            settings.gc_above = Some(percent.filter(|it| *it <= 100).context(
                "gc-above is not a percentage of the disk: write gc-above = 80, or a number from \
                0 to 100",
            )?);
        }
        "metrics" => {
            let address = text.and_then(MetricsAddress::parse);
            settings.metrics = Some(address.context(
                "metrics is neither an address with a port nor an absolute path: write metrics = \
                \"127.0.0.1:9110\", or \"/run/quire/metrics.sock\"",
            )?);
        }
        "metrics-remote" => {
            let is_remote = value.get_ref().as_bool();
            settings.metrics_remote =
                Some(is_remote.context("metrics-remote is neither true nor false")?);
        }
        "trust-index" => match text {
            Some(trust @ ("signed" | "repository")) => {
                settings.trust_repository = Some(trust == "repository");
            }
            _ => bail!("trust-index is neither \"signed\" nor \"repository\""),
        },
        key => bail!(
            "\"{}\" is not a setting of [snapshotter]: use {SNAPSHOTTER_KEYS}",
            key.escape_debug()
        ),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn check(text: &str, expect: Result<(Option<u32>, Option<&str>), &str>) {
        let parsed = parse(text, "f").map_err(|error| format!("{error:#}"));
        let expect =
            expect.map_err(ToOwned::to_owned).map(|(lazy_timeout, prefetch)| ServeSettings {
                lazy_timeout,
                prefetch: prefetch.map(ToOwned::to_owned),
                ..ServeSettings::default()
            });
        assert_eq!(parsed, expect, "{text}");
    }

    #[test]
    fn each_mistake_is_named_with_its_line() {
        check("", Ok((None, None)));
        check("# nothing\n\n", Ok((None, None)));
        check("lazy-timeout = 0", Ok((Some(0), None)));
        check("prefetch = \"none\"\nlazy-timeout = 3_600", Ok((Some(3600), Some("none"))));
        let seconds =
            "lazy-timeout is not a number of seconds: write lazy-timeout = 60, or 0 for no limit";
        for wrong in ["\"60\"", "-1", "1.5", "4294967296", "true", "[1]"] {
            check(&format!("\nlazy-timeout = {wrong}"), Err(&format!("f, line 2: {seconds}")));
        }
        let complete = |text| parse(text, "f").map(|it| it.complete);
        assert_eq!(complete("complete = true").unwrap(), Some(true));
        check("complete = 1", Err("f, line 1: complete is neither true nor false"));
        let after = |text| parse(text, "f").map(|it| it.complete_after);
        let written = "complete-after = \"never\"";
        assert_eq!(after(written).unwrap(), Some(CompleteAfter::Never));
        assert_eq!(after("complete-after = 0").unwrap(), Some(CompleteAfter::Seconds(0)));
        for wrong in ["false", "-1", "\"10\"", "1.5"] {
            check(
                &format!("complete-after = {wrong}"),
                Err("f, line 1: complete-after is neither a number of seconds nor \"never\": \
                     write complete-after = 10"),
            );
        }
        check(
            "prefetch = false",
            Err("f, line 1: prefetch is not a string: write prefetch = \"default\", or \"none\""),
        );
        check(
            "prefetch = \"A\"",
            Err("f, line 1: prefetch: \"A\" is not a name of a trace: use 1 to 64 lower-case \
                 letters, digits, `.`, `_` and `-`"),
        );
        check(
            "lazy-timeout = 1\n\n# more\nlazy_timeout = 2",
            Err("f, line 4: \"lazy_timeout\" is not a setting: use lazy-timeout, prefetch, \
                 complete, complete-after and the tables [snapshotter] and [mounts]"),
        );
        check(
            "[lazy]\ntimeout = 1",
            Err("f, line 1: \"lazy\" is not a setting: use lazy-timeout, prefetch, complete, \
                 complete-after and the tables [snapshotter] and [mounts]"),
        );
        check(
            "mirrors = []",
            Err("f, line 1: \"mirrors\" is not a setting: mirrors are in \
                 /etc/quire/certs.d/HOST/hosts.toml"),
        );
        let refused = |text| format!("{:#}", parse(text, "f").unwrap_err());
        assert!(refused("trust = 1").contains("--trust-index"));
        assert!(refused("\ncache = \"/var\"").starts_with("f, line 2: \"cache\" is not a setting"));
        for (text, line) in
            [("lazy-timeout", 1), ("prefetch = \"a\"\nprefetch = \"b\"", 2), ("\n\n= 3", 3)]
        {
            let error = parse(text, "f").unwrap_err().to_string();
            assert!(error.starts_with(&format!("f, line {line}: ")), "{text}: {error}");
        }
    }

    #[test]
    fn the_snapshotter_has_a_table() {
        let parsed = parse(
            "complete = true\n[snapshotter]\nsocket = \"/s\"\nengine = \"/e\"\ninstance = \"k3s\"\nskip = \"download\"\n\
             lazy = true\ntrust-index = \"repository\"\nimage-service = \"/i\"\ngc-above = 0\n\
             metrics = \"127.0.0.1:9110\"\nmetrics-remote = false",
            "f",
        )
        .unwrap();
        let expect = SnapshotterSettings {
            socket: Some("/s".into()),
            engine: Some("/e".into()),
            instance: Some("k3s".to_owned()),
            skip: Some(args::Skip::Download),
            lazy: Some(true),
            trust_repository: Some(true),
            image_service: Some("/i".into()),
            gc_above: Some(0),
            metrics: MetricsAddress::parse("127.0.0.1:9110"),
            metrics_remote: Some(false),
        };
        assert_eq!((parsed.complete, parsed.snapshotter), (Some(true), expect));
        for (text, expect) in [
            (
                "snapshotter = 1",
                "f, line 1: snapshotter is not a table: write [snapshotter] above its settings",
            ),
            ("[snapshotter]\nlazy = 1", "f, line 2: lazy is neither true nor false"),
            (
                "[snapshotter]\ntrust-index = \"any\"",
                "f, line 2: trust-index is neither \"signed\" nor \"repository\"",
            ),
            (
                "[snapshotter]\nsocket = \"s\"",
                "f, line 2: socket is not an absolute path: write socket = \"/run/…\"",
            ),
            (
                "[snapshotter]\n\nengine = 1",
                "f, line 3: engine is not an absolute path: write engine = \"/run/…\"",
            ),
            (
                "[snapshotter]\ninstance = []",
                "f, line 2: instance is not a string: write instance = \"containerd\"",
            ),
            (
                "[snapshotter]\nskip = \"DOWNLOAD\"",
                "f, line 2: skip is none of \"download\", \"unpack\" and \"never\"",
            ),
            (
                "[snapshotter]\n\"so\\u001bcket\" = 1",
                "f, line 2: \"so\\u{1b}cket\" is not a setting of [snapshotter]: use socket, \
                 engine, instance, skip, lazy, trust-index, image-service, gc-above, metrics and metrics-remote",
            ),
            (
                "[snapshotter]\nmetrics = \"localhost:9110\"",
                "f, line 2: metrics is neither an address with a port nor an absolute path: write \
                 metrics = \"127.0.0.1:9110\", or \"/run/quire/metrics.sock\"",
            ),
            (
                "[snapshotter]\nmetrics-remote = \"yes\"",
                "f, line 2: metrics-remote is neither true nor false",
            ),
            (
                "[snapshotter]\ngc-above = 101",
                "f, line 2: gc-above is not a percentage of the disk: write gc-above = 80, or a \
                 number from 0 to 100",
            ),
        ] {
            assert_eq!(format!("{:#}", parse(text, "f").unwrap_err()), expect, "{text}");
        }
    }

    /// Metrics have no password and no encryption.
    #[test]
    fn metrics_for_other_hosts_must_be_allowed() {
        let check = |text: &str, expect: Option<&str>| {
            let settings = parse(&format!("[snapshotter]\n{text}"), "f").unwrap().snapshotter;
            let refused = check_metrics(&settings).err().map(|it| it.to_string());
            match (&refused, expect) {
                (Some(refused), Some(part)) => assert!(refused.contains(part), "{text}: {refused}"),
                _ => assert_eq!(refused.is_some(), expect.is_some(), "{text}: {refused:?}"),
            }
        };
        check("", None);
        for local in ["127.0.0.1:9110", "[::1]:9110", "/run/quire/metrics.sock"] {
            check(&format!("metrics = \"{local}\""), None);
        }
        for other in ["0.0.0.0:9110", "10.0.0.5:9110", "[::]:9110"] {
            check(&format!("metrics = \"{other}\""), Some("metrics-remote = true"));
            check(&format!("metrics = \"{other}\"\nmetrics-remote = false"), Some("other hosts"));
            check(&format!("metrics = \"{other}\"\nmetrics-remote = true"), None);
        }
        check("metrics-remote = true", Some("needs an address"));
        // `doctor` finds the same errors.
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serve.toml");
        fs::write(&path, "[snapshotter]\nmetrics = \"0.0.0.0:1\"").unwrap();
        let refused = ServeFile::new(Some(&path)).snapshotter().unwrap_err();
        assert!(refused.contains("does not start") && refused.contains("other hosts"), "{refused}");
    }

    #[test]
    fn a_file_that_was_named_has_to_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serve.toml");
        let named = ServeFile::new(Some(&path));
        let error = format!("{:#}", named.load().unwrap_err());
        assert!(error.starts_with(&format!("cannot read {}: ", path.display())), "{error}");
        let usual = ServeFile { path: path.clone(), root: None, is_named: false };
        assert_eq!(usual.load().unwrap(), ServeSettings::default());
        assert!(usual.lazy().unwrap().starts_with("defaults ("));
        fs::write(&path, "lazy-timeout = 5").unwrap();
        assert_eq!(usual.load().unwrap(), named.load().unwrap());
        assert_eq!(usual.lazy(), Ok(format!("{}: lazy-timeout 5", path.display())));
        fs::write(&path, "lazy = 5").unwrap();
        let refused = usual.lazy().unwrap_err();
        assert!(refused.contains("line 1: \"lazy\" is not a setting"), "{refused}");
    }
}
