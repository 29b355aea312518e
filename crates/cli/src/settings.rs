//! `/etc/quire/serve.toml`: what the service for lazy devices is set to.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use serve::lazy::{Completion, DoorWish, READERS_WAIT, SourcePatience};
use store::check_trace_name;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

use crate::args;
use crate::notify::{self, ServiceStep};

/// The administrator's. It need not be there.
const SYSTEM: &str = "/etc/quire/serve.toml";
/// The trace that is fetched first, unless another is set.
const DEFAULT_TRACE: &str = "default";
/// In the place of a trace: none is fetched.
pub(crate) const NO_TRACE: &str = "none";
/// All that a file can set.
const KEYS: &str = "lazy-timeout, prefetch, complete and door";

/// What a file sets.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ServeSettings {
    /// How long a reader waits while no source gives anything, in seconds; 0 for no end.
    pub(crate) lazy_timeout: Option<u32>,
    /// The trace that mounts fetch which name none.
    pub(crate) prefetch: Option<String>,
    /// Whether all of each image is fetched.
    pub(crate) complete: Option<bool>,
    /// How programs wait.
    pub(crate) door: Option<args::Door>,
}

/// Where settings are read, also again.
#[derive(Debug, Clone)]
pub(crate) struct ServeFile {
    path: PathBuf,
    /// Whether a user named it: then it is a mistake if it is not there.
    is_named: bool,
}

impl ServeFile {
    /// The file that was named, or the administrator's.
    pub(crate) fn new(named: Option<&Path>) -> Self {
        let path = named.unwrap_or(Path::new(SYSTEM)).to_owned();
        Self { path, is_named: named.is_some() }
    }

    /// What it says now; what is not there sets nothing.
    pub(crate) fn load(&self) -> anyhow::Result<ServeSettings> {
        Ok(self.read()?.unwrap_or_default())
    }

    /// `None` if there is no file and need not be one.
    fn read(&self) -> anyhow::Result<Option<ServeSettings>> {
        let path = self.path.display();
        match fs::read_to_string(&self.path) {
            Ok(text) => Ok(Some(parse(&text, &path.to_string())?)),
            Err(error) if error.kind() == ErrorKind::NotFound && !self.is_named => Ok(None),
            Err(error) => Err(error).with_context(|| format!("cannot read {path}")),
        }
    }

    /// What is in force, in a line for people.
    pub(crate) fn describe(&self) -> String {
        let path = self.path.display();
        let settings = match self.read() {
            Ok(Some(settings)) => settings,
            Ok(None) => return format!("as usual ({path} is not there)"),
            Err(error) => return format!("`quire serve --lazy` does not start: {error:#}"),
        };
        let ServeSettings { lazy_timeout, prefetch, complete, door } = settings;
        let timeout = lazy_timeout.map(|it| format!("lazy-timeout {it}"));
        let prefetch = prefetch.map(|it| format!("prefetch {it}"));
        let complete = complete.map(|it| format!("complete {it}"));
        let door = door.map(|it| format!("door {}", it.name()));
        let set: Vec<_> = [timeout, prefetch, complete, door].into_iter().flatten().collect();
        let set = if set.is_empty() { "sets nothing".to_owned() } else { set.join(", ") };
        format!("{path}: {set}")
    }
}

/// The settings that are in force, which change while the service runs.
#[derive(Debug)]
pub(crate) struct Tuning {
    file: ServeFile,
    /// What an option says, the file does not change.
    lazy_timeout: Option<u32>,
    always_complete: bool,
    complete: AtomicBool,
    patience: SourcePatience,
    prefetch: Mutex<Option<String>>,
    /// As an option says.
    only_door: Option<args::Door>,
    door: Mutex<Option<args::Door>>,
    is_ready: AtomicBool,
}

impl Tuning {
    /// As the file and the options say.
    pub(crate) fn new(args: &args::Serve) -> anyhow::Result<Self> {
        let tuning = Self {
            file: ServeFile::new(args.config.as_deref()),
            lazy_timeout: args.lazy_timeout,
            always_complete: args.complete,
            complete: AtomicBool::default(),
            patience: SourcePatience::default(),
            prefetch: Mutex::default(),
            only_door: args.door,
            door: Mutex::default(),
            is_ready: AtomicBool::new(false),
        };
        match tuning.file.load() {
            Ok(settings) => tuning.set(settings),
            // Programs wait for it: nobody is there who could mend the file first.
            Err(error) if args.again => {
                let error = format!("{error:#}");
                tracing::error!(error, "started with the usual settings");
                tuning.set(ServeSettings::default());
            }
            Err(error) => return Err(error),
        }
        Ok(tuning)
    }

    fn set(&self, settings: ServeSettings) {
        let ServeSettings { lazy_timeout, prefetch, complete, door } = settings;
        *self.door.lock().unwrap_or_else(PoisonError::into_inner) = self.only_door.or(door);
        let complete = self.always_complete || complete.unwrap_or_default();
        self.complete.store(complete, Ordering::Relaxed);
        let seconds = self.lazy_timeout.or(lazy_timeout);
        let wait = seconds.map_or(READERS_WAIT, |it| Duration::from_secs(it.into()));
        self.patience.set_wait(Some(wait).filter(|it| !it.is_zero()));
        *self.prefetch.lock().unwrap_or_else(PoisonError::into_inner) = prefetch;
    }

    pub(crate) const fn patience(&self) -> &SourcePatience {
        &self.patience
    }

    /// Which devices are brought as a whole.
    pub(crate) fn completion(&self) -> Completion {
        if self.complete.load(Ordering::Relaxed) { Completion::Always } else { Completion::Asked }
    }

    /// How readers wait of devices that are lent from now on.
    pub(crate) fn door(&self) -> DoorWish {
        let set = *self.door.lock().unwrap_or_else(PoisonError::into_inner);
        set.map_or_else(DoorWish::default, args::Door::wish)
    }

    /// The trace for mounts that name none.
    pub(crate) fn prefetch(&self) -> String {
        let set = self.prefetch.lock().unwrap_or_else(PoisonError::into_inner);
        set.as_deref().unwrap_or(DEFAULT_TRACE).to_owned()
    }

    /// Clients can ask.
    pub(crate) fn ready(&self) {
        self.is_ready.store(true, Ordering::Relaxed);
        notify::tell(ServiceStep::Ready);
    }

    /// Reads the file again. If it cannot be used, all stays as it is.
    pub(crate) fn reload(&self) {
        let is_ready = self.is_ready.load(Ordering::Relaxed);
        if is_ready {
            notify::tell(ServiceStep::Reloading);
        }
        match self.file.load() {
            Ok(settings) => {
                self.set(settings);
                tracing::info!(settings = self.file.describe(), "read again");
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::error!(error, "the settings stay as they are");
            }
        }
        if is_ready {
            notify::tell(ServiceStep::Ready);
        }
    }
}

/// What a text sets. Each error names the line of `path`, the key, and what would be right.
fn parse(text: &str, path: &str) -> anyhow::Result<ServeSettings> {
    let at = |place: usize| {
        let before = text.get(..place).unwrap_or(text);
        format!("{path}, line {}", before.matches('\n').count() + 1)
    };
    let table = DeTable::parse(text).map_err(|error| {
        let place = error.span().map_or(text.len(), |it| it.start);
        anyhow::anyhow!(
            "{}: {}: write a setting in each line, as door = \"auto\"",
            at(place),
            error.message()
        )
    })?;
    let mut settings = ServeSettings::default();
    for (key, value) in table.get_ref() {
        let place = at(key.span().start);
        set(&mut settings, key, value).with_context(|| place)?;
    }
    Ok(settings)
}

fn set(
    settings: &mut ServeSettings,
    key: &Spanned<DeString<'_>>,
    value: &Spanned<DeValue<'_>>,
) -> anyhow::Result<()> {
    let value = value.get_ref();
    match &key.get_ref()[..] {
        "lazy-timeout" => {
            let number = value.as_integer().filter(|it| it.radix() == 10);
            let Some(seconds) = number.and_then(|it| it.as_str().parse().ok()) else {
                bail!(
                    "lazy-timeout is not a number of seconds: write lazy-timeout = 60, or 0 for no end"
                );
            };
            settings.lazy_timeout = Some(seconds);
        }
        "prefetch" => {
            let Some(name) = value.as_str() else {
                bail!("prefetch is not text: write prefetch = \"default\", or \"{NO_TRACE}\"");
            };
            check_trace_name(name).context("prefetch")?;
            settings.prefetch = Some(name.to_owned());
        }
        "complete" => {
            let complete = value.as_bool();
            settings.complete = Some(complete.context("complete is neither true nor false")?);
        }
        "door" => {
            let named = value.as_str().map(|it| args::Door::from_str(it, false));
            let Some(Ok(door)) = named else {
                bail!("door is none of \"auto\", \"fanotify\" and \"fuse\"");
            };
            settings.door = Some(door);
        }
        "mirrors" | "mirror" | "registry" | "registries" | "host" => {
            bail!(
                "\"{}\" is no setting: mirrors stand in /etc/quire/certs.d/HOST/hosts.toml",
                key.get_ref()
            )
        }
        key @ ("trust" | "trust-index") => bail!(
            "\"{key}\" is no setting: whose indexes are used is decided when an image is pulled: `quire pull --lazy \
             --trust-index`, and signatures by policy.json"
        ),
        "cache" => bail!(
            "\"cache\" is no setting: what is fetched is kept in the store, until `quire rm` and `quire gc`"
        ),
        key => bail!("\"{}\" is no setting: there are {KEYS}", key.escape_debug()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(text: &str, expect: Result<(Option<u32>, Option<&str>), &str>) {
        let parsed = parse(text, "f").map_err(|error| format!("{error:#}"));
        let expect =
            expect.map_err(ToOwned::to_owned).map(|(lazy_timeout, prefetch)| ServeSettings {
                lazy_timeout,
                prefetch: prefetch.map(ToOwned::to_owned),
                complete: None,
                door: None,
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
            "lazy-timeout is not a number of seconds: write lazy-timeout = 60, or 0 for no end";
        for wrong in ["\"60\"", "-1", "1.5", "4294967296", "true", "[1]"] {
            check(&format!("\nlazy-timeout = {wrong}"), Err(&format!("f, line 2: {seconds}")));
        }
        let complete = |text| parse(text, "f").map(|it| it.complete);
        assert_eq!(complete("complete = true").unwrap(), Some(true));
        check("complete = 1", Err("f, line 1: complete is neither true nor false"));
        let door = |text| parse(text, "f").map(|it| it.door);
        assert_eq!(door("door = \"fuse\"").unwrap(), Some(args::Door::Fuse));
        for wrong in ["door = true", "door = \"FUSE\""] {
            check(wrong, Err("f, line 1: door is none of \"auto\", \"fanotify\" and \"fuse\""));
        }
        check(
            "prefetch = false",
            Err("f, line 1: prefetch is not text: write prefetch = \"default\", or \"none\""),
        );
        check(
            "prefetch = \"A\"",
            Err(
                "f, line 1: prefetch: \"A\" is no name of a trace: use 1 to 64 lower-case letters, digits, `.`, `_` and `-`",
            ),
        );
        check(
            "lazy-timeout = 1\n\n# more\nlazy_timeout = 2",
            Err(
                "f, line 4: \"lazy_timeout\" is no setting: there are lazy-timeout, prefetch, complete and door",
            ),
        );
        check(
            "[lazy]\ntimeout = 1",
            Err(
                "f, line 1: \"lazy\" is no setting: there are lazy-timeout, prefetch, complete and door",
            ),
        );
        check(
            "mirrors = []",
            Err(
                "f, line 1: \"mirrors\" is no setting: mirrors stand in /etc/quire/certs.d/HOST/hosts.toml",
            ),
        );
        let refused = |text| format!("{:#}", parse(text, "f").unwrap_err());
        assert!(refused("trust = 1").contains("--trust-index"));
        assert!(refused("\ncache = \"/var\"").starts_with("f, line 2: \"cache\" is no setting"));
        for (text, line) in
            [("lazy-timeout", 1), ("prefetch = \"a\"\nprefetch = \"b\"", 2), ("\n\n= 3", 3)]
        {
            let error = parse(text, "f").unwrap_err().to_string();
            assert!(error.starts_with(&format!("f, line {line}: ")), "{text}: {error}");
        }
    }

    #[test]
    fn a_file_that_was_named_has_to_be_there() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("serve.toml");
        let named = ServeFile::new(Some(&path));
        let error = format!("{:#}", named.load().unwrap_err());
        assert!(error.starts_with(&format!("cannot read {}: ", path.display())), "{error}");
        let usual = ServeFile { path: path.clone(), is_named: false };
        assert_eq!(usual.load().unwrap(), ServeSettings::default());
        assert!(usual.describe().starts_with("as usual ("));
        fs::write(&path, "lazy-timeout = 5").unwrap();
        assert_eq!(usual.load().unwrap(), named.load().unwrap());
        assert_eq!(usual.describe(), format!("{}: lazy-timeout 5", path.display()));
        fs::write(&path, "lazy = 5").unwrap();
        assert!(
            usual.describe().contains("line 1: \"lazy\" is no setting"),
            "{}",
            usual.describe()
        );
    }
}
