//! Labels of security modules: the AppArmor profile of a container, and the state of SELinux (decision 30).

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

/// Name of the profile for root's containers.
pub const PROFILE: &str = "quire-default";

/// Text of [`PROFILE`]. Quire's Debian package installs the same file as [`INSTALLED`].
const TEXT: &str = include_str!("apparmor.profile");

/// An installed profile, which the administrator may have changed.
const INSTALLED: &str = "etc/apparmor.d/quire-default";

/// File in which the kernel reports whether AppArmor is enabled.
const ENABLED: &str = "sys/module/apparmor/parameters/enabled";

/// File that lists the loaded profiles, readable only by root. Like Quire, runtimes regard AppArmor as disabled if
/// its folder is missing.
const PROFILES: &str = "sys/kernel/security/apparmor/profiles";

/// Files with the profile of this process. The second one is for kernels before 5.8, where no other module had such a
/// file.
const OWN: [&str; 2] = ["proc/self/attr/apparmor/current", "proc/self/attr/current"];

/// Program that loads profiles.
const PARSER: &str = "apparmor_parser";

/// The AppArmor profile of a container's programs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AppArmor {
    /// Programs keep the runtime's profile, if it has one.
    #[default]
    Unconfined,
    /// [`PROFILE`].
    Usual,
    /// A profile that the caller named.
    Named(String),
}

impl AppArmor {
    /// Returns the field `apparmorProfile` of the runtime's configuration.
    pub(crate) fn entry(&self) -> Option<String> {
        match self {
            Self::Unconfined => None,
            Self::Usual => Some(PROFILE.to_owned()),
            Self::Named(name) => Some(name.clone()),
        }
    }
}

/// The caller's choice of a profile.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ProfileRequest {
    /// The caller chose nothing.
    #[default]
    Default,
    /// The caller wants no profile.
    Unconfined,
    /// The caller wants the profile with this name.
    Named(String),
}

/// The user that starts a container.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Starter {
    /// The host's root.
    Root,
    /// The host's root, for a privileged container.
    PrivilegedByRoot,
    /// Another user, or root of a user namespace.
    User,
}

/// State of AppArmor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AppArmorState {
    /// The kernel lacks AppArmor, or it is disabled.
    Off,
    On {
        /// Profile that confines this process and that its children inherit.
        own: Option<String>,
        /// Names of the loaded profiles; `None` if this process cannot read them.
        loaded: Option<Vec<String>>,
    },
}

/// Action for a container's profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProfileChoice {
    /// Use this profile, which is loaded, or none.
    Use(AppArmor),
    /// Load [`PROFILE`], and use it.
    Load,
    /// The loaded profiles cannot be read, so none can be used.
    Unlisted,
}

/// Reason why a container cannot have a profile.
#[derive(Debug, thiserror::Error)]
pub enum LabelError {
    /// The container's starter is not the host's root.
    #[error(
        "AppArmor profile \"{0}\": only containers of the host's root can have a profile; leave \
        the option out"
    )]
    User(String),
    /// AppArmor is disabled.
    #[error("AppArmor profile \"{0}\": AppArmor is off on this host")]
    Off(String),
    /// The kernel has not loaded the profile.
    #[error(
        "AppArmor profile \"{0}\" is not loaded: `apparmor_parser --replace FILE` loads a file of profiles"
    )]
    Absent(String),
    /// The loaded profiles cannot be read.
    #[error("AppArmor profile \"{0}\": cannot read /{PROFILES}, so it may not be loaded")]
    Unlisted(String),
    /// The program that loads [`PROFILE`] is not installed.
    #[error("{PARSER} is not installed (Debian: package apparmor)")]
    NoParser,
    /// The parser cannot be executed.
    #[error("cannot run {}", program.display())]
    Start { program: PathBuf, source: std::io::Error },
    /// The parser, or the kernel, refused [`PROFILE`].
    #[error("cannot load the AppArmor profile {PROFILE}: {0}")]
    Load(String),
}

impl AppArmorState {
    /// Reads the state from the kernel.
    #[must_use]
    pub fn probe() -> Self {
        Self::probe_below(Path::new("/"))
    }

    fn probe_below(root: &Path) -> Self {
        let read = |name: &str| std::fs::read_to_string(root.join(name)).ok();
        if !read(ENABLED).is_some_and(|it| it.starts_with('Y')) {
            return Self::Off;
        }
        let own = OWN.into_iter().find_map(read).and_then(|it| confining(&it));
        let loaded = read(PROFILES).map(|it| it.lines().filter_map(name_of).collect());
        Self::On { own, loaded }
    }

    /// Whether the kernel has loaded this profile.
    fn has(&self, name: &str) -> bool {
        matches!(self, Self::On { loaded: Some(loaded), .. } if loaded.iter().any(|it| it == name))
    }

    /// Chooses the profile of a container.
    ///
    /// # Errors
    /// [`LabelError`] if the caller named a profile that the container cannot have.
    pub fn choose(
        &self,
        wish: &ProfileRequest,
        starter: Starter,
    ) -> Result<ProfileChoice, LabelError> {
        let none = Ok(ProfileChoice::Use(AppArmor::Unconfined));
        let name = match wish {
            ProfileRequest::Unconfined => return none,
            // podman does the same.
            ProfileRequest::Default if starter != Starter::Root => return none,
            ProfileRequest::Default => None,
            ProfileRequest::Named(name) if starter == Starter::User => {
                return Err(LabelError::User(name.clone()));
            }
            ProfileRequest::Named(name) => Some(name),
        };
        match (self, name) {
            (Self::Off, None) | (Self::On { own: Some(_), .. }, None) => none,
            (Self::Off, Some(name)) => Err(LabelError::Off(name.clone())),
            (Self::On { loaded: None, .. }, None) => Ok(ProfileChoice::Unlisted),
            (Self::On { loaded: None, .. }, Some(name)) => Err(LabelError::Unlisted(name.clone())),
            (Self::On { .. }, None) if self.has(PROFILE) => Ok(ProfileChoice::Use(AppArmor::Usual)),
            (Self::On { .. }, Some(name)) if self.has(name) => {
                Ok(ProfileChoice::Use(AppArmor::Named(name.clone())))
            }
            (Self::On { .. }, Some(name)) if name != PROFILE => {
                Err(LabelError::Absent(name.clone()))
            }
            (Self::On { .. }, _) => Ok(ProfileChoice::Load),
        }
    }
}

/// Returns the name in a line `NAME (MODE)` of the kernel's list. Names can contain spaces.
fn name_of(line: &str) -> Option<String> {
    Some(line.rsplit_once(" (")?.0.to_owned())
}

/// Returns the profile in a line of the kernel if the profile restricts programs. Profiles in the mode `unconfined`
/// have no rules, and those in `complain` only log.
fn confining(line: &str) -> Option<String> {
    let (name, mode) = line.trim_end().rsplit_once(" (")?;
    (!["unconfined)", "complain)"].contains(&mode)).then(|| name.to_owned())
}

/// Returns the path of the program that loads profiles. `search` has the syntax of `PATH`, and may lack the
/// administrator's folders.
#[must_use]
pub fn parser(search: &OsStr) -> Option<PathBuf> {
    let folders = std::env::split_paths(search);
    let folders = folders.chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|it| it.join(PARSER)).find(|it| it.is_file())
}

/// Loads [`PROFILE`] from the installed file, or else from Quire's own text.
pub fn load(search: &OsStr) -> Result<(), LabelError> {
    let program = parser(search).ok_or(LabelError::NoParser)?;
    let installed = Path::new("/").join(INSTALLED);
    let is_installed = installed.is_file();
    let mut command = Command::new(&program);
    // A cache file would have to be removed together with Quire.
    command.args(["--replace", "--skip-cache"]).args(is_installed.then_some(&installed));
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let failed = |source| LabelError::Start { program: program.clone(), source };
    let mut child = command.spawn().map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        // If the parser does not read its input, it reports an error itself. The text fits into a pipe, so the write
        // does not block.
        let text = if is_installed { "" } else { TEXT };
        let _written = input.write_all(text.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed)?;
    let said = String::from_utf8_lossy(&output.stderr);
    let said = said.lines().map(str::trim).find(|it| !it.is_empty()).unwrap_or("no reason given");
    match AppArmorState::probe().has(PROFILE) {
        true => Ok(()),
        false => Err(LabelError::Load(said.to_owned())),
    }
}

/// State of SELinux.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeLinuxState {
    /// SELinux forbids nothing, because the kernel lacks it, or because it is disabled or permissive.
    Idle,
    /// SELinux enforces its policy.
    Enforcing,
}

impl SeLinuxState {
    /// Reads the state from the kernel. Source: selinuxfs, `enforce`.
    #[must_use]
    pub fn probe() -> Self {
        let text = std::fs::read_to_string("/sys/fs/selinux/enforce");
        if text.is_ok_and(|it| it.trim() == "1") { Self::Enforcing } else { Self::Idle }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on(own: Option<&str>, loaded: &[&str]) -> AppArmorState {
        let loaded = Some(loaded.iter().map(|it| (*it).to_owned()).collect());
        AppArmorState::On { own: own.map(ToOwned::to_owned), loaded }
    }

    /// Source of the expected values: podman, pkg/specgen/generate/security_linux.go (`setupApparmor`), and
    /// containers/common, pkg/apparmor/apparmor_linux.go (`CheckProfileAndLoadDefault`).
    #[test]
    fn a_container_has_the_profile_that_podman_would_choose() {
        use ProfileChoice::{Load, Unlisted, Use};
        use Starter::{PrivilegedByRoot, Root, User};
        let (none, usual) = (Use(AppArmor::Unconfined), Use(AppArmor::Usual));
        let off = AppArmorState::Off;
        let (loaded, bare) = (on(None, &["a b", PROFILE]), on(None, &["a b"]));
        let unlisted = AppArmorState::On { own: None, loaded: None };
        let inside = on(Some("docker-default"), &[PROFILE]);
        let check = |state: &AppArmorState, starter, name: Option<&str>, expect: &ProfileChoice| {
            let wish = match name {
                None => ProfileRequest::Default,
                Some("unconfined") => ProfileRequest::Unconfined,
                Some(name) => ProfileRequest::Named(name.to_owned()),
            };
            let found = state.choose(&wish, starter).unwrap();
            assert_eq!(&found, expect, "{state:?} {starter:?} {name:?}");
        };
        let named = |name: &str| Use(AppArmor::Named(name.to_owned()));
        check(&loaded, Root, None, &usual);
        check(&bare, Root, None, &Load);
        check(&unlisted, Root, None, &Unlisted);
        for state in [&off, &inside] {
            check(state, Root, None, &none);
        }
        for state in [&off, &loaded, &bare, &unlisted, &inside] {
            for starter in [PrivilegedByRoot, User] {
                check(state, starter, None, &none);
            }
            for starter in [Root, PrivilegedByRoot, User] {
                check(state, starter, Some("unconfined"), &none);
            }
        }
        for starter in [Root, PrivilegedByRoot] {
            check(&loaded, starter, Some("a b"), &named("a b"));
            check(&loaded, starter, Some(PROFILE), &named(PROFILE));
            check(&bare, starter, Some(PROFILE), &Load);
        }
    }

    #[test]
    fn a_named_profile_is_used_or_an_error() {
        let check = |state: &AppArmorState, starter, name: &str, expect: &str| {
            let wish = ProfileRequest::Named(name.to_owned());
            let error = state.choose(&wish, starter).unwrap_err().to_string();
            assert!(error.contains(expect), "{error}");
        };
        let loaded = on(None, &[PROFILE]);
        check(&AppArmorState::Off, Starter::Root, "a", "AppArmor is off");
        check(&loaded, Starter::Root, "a", "\"a\" is not loaded");
        // A prefix of a profile's name is not its name.
        check(&loaded, Starter::Root, "quire", "\"quire\" is not loaded");
        check(&loaded, Starter::User, PROFILE, "only containers of the host's root");
        let unlisted = AppArmorState::On { own: None, loaded: None };
        check(&unlisted, Starter::PrivilegedByRoot, "a", "cannot read /sys/kernel/security");
    }

    #[test]
    fn the_state_is_what_the_kernel_says() {
        let root = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = root.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let probe = || AppArmorState::probe_below(root.path());
        assert_eq!(probe(), AppArmorState::Off);
        write(ENABLED, "N\n");
        assert_eq!(probe(), AppArmorState::Off);
        write(ENABLED, "Y\n");
        assert_eq!(probe(), AppArmorState::On { own: None, loaded: None });
        write(PROFILES, "/usr/bin/a (enforce)\na b (x) (complain)\nquire-default (enforce)\n");
        assert_eq!(probe(), on(None, &["/usr/bin/a", "a b (x)", PROFILE]));
        // Only kernels without the first file use the second file.
        write(OWN[1], "old (enforce)\n");
        assert_eq!(probe(), on(Some("old"), &["/usr/bin/a", "a b (x)", PROFILE]));
        for (text, own) in [
            ("unconfined\n", None),
            ("quire (unconfined)\n", None),
            ("quire (complain)\n", None),
            ("docker-default (enforce)\n", Some("docker-default")),
            ("a (kill)\n", Some("a")),
            ("a b//&c (mixed)", Some("a b//&c")),
        ] {
            assert_eq!(confining(text).as_deref(), own, "{text}");
        }
    }

    /// A profile that is loaded under another name would not be found.
    #[test]
    fn the_profile_has_its_name_and_ends() {
        let profile = format!("\nprofile {PROFILE} flags=");
        assert_eq!((TEXT.matches(&profile).count(), TEXT.ends_with("}\n")), (1, true));
        assert!(TEXT.contains(&format!("peer={PROFILE},")) && INSTALLED.ends_with(PROFILE));
        // The text is written to a pipe before the parser reads it, so it must fit: pipe(7).
        assert!(TEXT.len() < 65536);
    }
}
