//! `run.toml`: a host's and a user's defaults of `run` and `create`.

use std::io::ErrorKind;
use std::num::{NonZeroU32, NonZeroU64};
use std::path::Path;

use anyhow::{Context as _, bail};
use clap::ValueEnum as _;
use container::root::WritableChoice;
use kernel::process::Who;
use toml::de::DeValue;

use crate::args::cpu;
use crate::args::writable::{memory, writable};
use crate::args::{ContainerOptions, NetworkKind, PullPolicy};
use crate::session::settings::settings_file::{FILE_MAX, SettingsFile};
use crate::session::settings::user_config::user_config;
use crate::verbs::Verb;
use crate::verbs::containers::run::NewContainer;

/// The administrator's file, which may be missing.
const SYSTEM: &str = "/etc/quire/run.toml";

/// Name of the user's file in its directory.
const NAME: &str = "run.toml";

/// All keys.
const KEYS: &str =
    "network, pull, rm, writable, memory, cpus, cpu-shares, cpuset-cpus and pids-limit";

/// The settings of a file. Each is the default of the option of the same name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct RunDefaults {
    network: Option<NetworkKind>,
    pull: Option<PullPolicy>,
    /// Only for containers in the foreground: those in the background stay in any case.
    rm: Option<bool>,
    writable: Option<WritableChoice>,
    memory: Option<u64>,
    cpus: Option<NonZeroU32>,
    cpu_shares: Option<NonZeroU64>,
    cpuset_cpus: Option<String>,
    pids_limit: Option<i64>,
}

/// Adds the defaults of the files to the options of `run` and `create`. `who` is the user of this process, outside of a
/// container's namespace.
///
/// # Errors
/// If a file cannot be read, or has an unknown key or an invalid value.
pub(crate) fn apply(verb: &mut Verb, who: Who) -> anyhow::Result<()> {
    let (new, is_foreground) = match verb {
        Verb::Run(args) => {
            let is_foreground = !args.detach;
            (&mut args.new, is_foreground)
        }
        Verb::Create(args) => (&mut args.new, false),
        _ => return Ok(()),
    };
    let mut defaults = load(Path::new(SYSTEM))?.unwrap_or_default();
    if let Some(path) = user_config(who, NAME)
        && let Some(own) = load(&path)?
    {
        defaults = own.or(defaults);
    }
    if is_foreground {
        new.rm = new.rm.or(defaults.rm);
    }
    defaults.fill(new);
    Ok(())
}

/// Reads a file. Returns `None` if it does not exist.
fn load(path: &Path) -> anyhow::Result<Option<RunDefaults>> {
    let failed = || format!("cannot read {}", path.display());
    let bytes = match oci::files::read_settings(path, FILE_MAX) {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
            return Ok(None);
        }
        read => read.with_context(failed)?,
    };
    let text = String::from_utf8(bytes).ok().context("it is not UTF-8").with_context(failed)?;
    parse(&text, &path.display().to_string()).map(Some)
}

/// Parses settings. Each error names the line of `path`, the key, and the expected value.
fn parse(text: &str, path: &str) -> anyhow::Result<RunDefaults> {
    let file = SettingsFile::parse(text, path, "network = \"pasta\"")?;
    let mut defaults = RunDefaults::default();
    for (key, value) in file.table() {
        defaults.set(&key.get_ref()[..], value.get_ref()).with_context(|| file.place(key))?;
    }
    Ok(defaults)
}

impl RunDefaults {
    fn set(&mut self, key: &str, value: &DeValue<'_>) -> anyhow::Result<()> {
        match key {
            "network" => self.network = Some(text(key, value, "pasta", str::parse)?),
            "pull" => {
                self.pull = Some(text(key, value, "missing", |text| {
                    let wrong = |_: String| "use always, missing or never".to_owned();
                    PullPolicy::from_str(text, false).map_err(wrong)
                })?);
            }
            "rm" => {
                let found = value.as_bool();
                self.rm = Some(found.context("rm is not true or false: write rm = false")?);
            }
            "writable" => self.writable = Some(text(key, value, "dir", writable)?),
            "memory" => self.memory = Some(text(key, value, "512m", memory)?),
            "cpus" => self.cpus = Some(number(key, value, "1.5", cpu::quota)?),
            "cpu-shares" => self.cpu_shares = Some(number(key, value, "512", cpu::shares)?),
            "cpuset-cpus" => self.cpuset_cpus = Some(text(key, value, "0-2,7", cpu::list)?),
            "pids-limit" => {
                self.pids_limit = Some(number(key, value, "512", |text| {
                    text.parse().map_err(|_wrong| "it is not a whole number".to_owned())
                })?);
            }
            key => bail!("\"{}\" is not a setting: use {KEYS}", key.escape_debug()),
        }
        Ok(())
    }

    /// Returns these settings, with those of `other` where these lack one.
    fn or(self, other: Self) -> Self {
        Self {
            network: self.network.or(other.network),
            pull: self.pull.or(other.pull),
            rm: self.rm.or(other.rm),
            writable: self.writable.or(other.writable),
            memory: self.memory.or(other.memory),
            cpus: self.cpus.or(other.cpus),
            cpu_shares: self.cpu_shares.or(other.cpu_shares),
            cpuset_cpus: self.cpuset_cpus.or(other.cpuset_cpus),
            pids_limit: self.pids_limit.or(other.pids_limit),
        }
    }

    /// Sets the options that the command line lacks.
    fn fill(self, new: &mut NewContainer) {
        let publishes = !new.published().is_empty();
        let ContainerOptions { network, writable, read_only, memory, cpu, security, lazy, .. } =
            &mut new.wanted;
        // Published ports imply a network by pasta.
        if network.is_none() && !publishes {
            *network = self.network;
        }
        if writable.is_none() && !*read_only {
            *writable = self.writable;
        }
        *memory = memory.or(self.memory);
        cpu.cpus = cpu.cpus.or(self.cpus);
        cpu.cpu_shares = cpu.cpu_shares.or(self.cpu_shares);
        cpu.cpuset_cpus = cpu.cpuset_cpus.take().or(self.cpuset_cpus);
        security.pids_limit = security.pids_limit.or(self.pids_limit);
        lazy.pull.pull = lazy.pull.pull.or(self.pull);
    }
}

/// Parses a string.
fn text<T, E: std::fmt::Display>(
    key: &str,
    value: &DeValue<'_>,
    example: &str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> anyhow::Result<T> {
    let text = value
        .as_str()
        .with_context(|| format!("{key} is not a string: write {key} = \"{example}\""))?;
    parse(text).map_err(|error| anyhow::anyhow!("{key} = \"{}\": {error}", text.escape_debug()))
}

/// Parses a number, or a string with one.
fn number<T, E: std::fmt::Display>(
    key: &str,
    value: &DeValue<'_>,
    example: &str,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> anyhow::Result<T> {
    let integer = value.as_integer().filter(|it| it.radix() == 10).map(|it| it.as_str());
    let found = value.as_str().or(integer).or_else(|| value.as_float().map(|it| it.as_str()));
    let text = found.with_context(|| format!("{key} is not a number: write {key} = {example}"))?;
    parse(text).map_err(|error| anyhow::anyhow!("{key} = {}: {error}", text.escape_debug()))
}

#[cfg(test)]
mod tests {
    use clap::FromArgMatches as _;

    use super::*;

    #[test]
    fn each_key_is_an_option() {
        let text = "network = \"pasta\"\npull = \"never\"\nrm = false\nwritable = \"dir,size=1g\"\nmemory = \"512m\"\n\
            cpus = 1.5\ncpu-shares = 512\ncpuset-cpus = \"0-2\"\npids-limit = -1\n";
        let found = parse(text, "f").unwrap();
        let expect = RunDefaults {
            network: Some(NetworkKind::Pasta),
            pull: Some(PullPolicy::Never),
            rm: Some(false),
            writable: Some(writable("dir,size=1g").unwrap()),
            memory: Some(512 << 20),
            cpus: NonZeroU32::new(150_000),
            cpu_shares: NonZeroU64::new(512),
            cpuset_cpus: Some("0-2".to_owned()),
            pids_limit: Some(-1),
        };
        assert_eq!(found, expect);
        for key in KEYS.split([',', ' ']).filter(|it| !it.is_empty() && *it != "and") {
            assert!(text.contains(&format!("{key} = ")), "{key}");
        }
    }

    #[test]
    fn each_mistake_is_named_with_its_file_and_its_line() {
        let cases = [
            ("\nnetwork = 1", "f, line 2: network is not a string: write network = \"pasta\""),
            ("network = \"bridge\"", "f, line 1: network = \"bridge\": use pasta"),
            ("pull = \"newer\"", "f, line 1: pull = \"newer\": use always, missing or never"),
            ("memory = \"1k\"", "f, line 1: memory = \"1k\": 1k is too little"),
            ("rm = \"no\"", "f, line 1: rm is not true or false: write rm = false"),
            ("cpus = true", "f, line 1: cpus is not a number: write cpus = 1.5"),
            ("pids-limit = 1.5", "f, line 1: pids-limit = 1.5: it is not a whole number"),
            (
                "# a\n\nnetwrok = \"none\"",
                "f, line 3: \"netwrok\" is not a setting: use network, pull",
            ),
            ("network = \"none\"\nnetwork = \"host\"", "f, line 2: duplicate key"),
            ("network none", "f, line 1: "),
        ];
        for (text, expect) in cases {
            let error = format!("{:#}", parse(text, "f").unwrap_err());
            assert!(error.starts_with(expect), "{text}: {error}");
        }
    }

    #[test]
    fn options_come_before_the_users_file_and_that_before_the_hosts() {
        let user = parse("network = \"host\"\nmemory = \"64m\"", "user").unwrap();
        let host =
            parse("network = \"pasta\"\npids-limit = 9\nwritable = \"memory\"", "host").unwrap();
        let merged = user.or(host);
        let filled = |words: &[&str]| {
            let command = <NewContainer as clap::Args>::augment_args(
                clap::Command::default().no_binary_name(true).disable_help_flag(true),
            );
            let matches = command.try_get_matches_from(words).unwrap();
            let mut new = NewContainer::from_arg_matches(&matches).unwrap();
            merged.clone().fill(&mut new);
            new
        };
        let new = filled(&["app"]);
        assert_eq!(new.wanted.network, Some(NetworkKind::Host));
        assert_eq!(new.wanted.memory, Some(64 << 20));
        assert_eq!(new.wanted.security.pids_limit, Some(9));
        assert_eq!(new.wanted.writable, Some(WritableChoice::Memory(None)));
        let new = filled(&["--network", "none", "--memory", "8m", "--read-only", "app"]);
        assert_eq!(new.wanted.network, Some(NetworkKind::None));
        assert_eq!(new.wanted.memory, Some(8 << 20));
        assert_eq!(new.wanted.writable, None);
        assert_eq!(filled(&["-p", "", "app"]).wanted.network, Some(NetworkKind::Host));
        assert_eq!(filled(&["--memory", "0", "app"]).wanted.memory_limit(), None);
        // Published ports need pasta.
        assert_eq!(filled(&["-p", "80", "app"]).wanted.network, None);
    }

    #[test]
    fn a_file_may_be_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.toml");
        assert_eq!(load(&path).unwrap(), None);
        std::fs::write(&path, "").unwrap();
        assert_eq!(load(&path).unwrap(), Some(RunDefaults::default()));
        std::fs::write(&path, "x = 1").unwrap();
        let error = format!("{:#}", load(&path).unwrap_err());
        assert!(error.starts_with(&format!("{}, line 1: ", path.display())), "{error}");
    }
}
