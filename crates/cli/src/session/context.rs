//! The context of every verb: the user, the store's directory, the policy, logging and errors.

use std::io::{ErrorKind, IsTerminal as _};
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use image::verity::Algorithm;
use kernel::features::Can;
use kernel::mount::OVERLAY_VERITY;
use kernel::process::{UserNamespace, Who};
use kernel::version::KernelVersion;
use rustix::io::Errno;
use store::{Create, NotShared, OpenOptions, Sealing, SharedStore, Store};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;
use transfer::export::ExportError;

use crate::args::{Global, ObjectHash, Seal};
use crate::output::progress::{Progress, Shown};
use crate::output::report;
use crate::session::accounts::accounts;
use crate::session::failure::{FailureReport, refusal};
use crate::session::hints::{filestore_hint, hint};
use crate::session::resolve::{Unresolved, resolve};

#[derive(Debug, Clone)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of the command line")]
pub(crate) struct Context {
    store: Option<PathBuf>,
    shared: Vec<SharedStore>,
    policy: Option<PathBuf>,
    who: Who,
    outside: Who,
    sealing: Option<Sealing>,
    object_hash: Option<Algorithm>,
    pub(crate) json: bool,
    /// Print no progress and no remarks, and only ids in lists.
    pub(crate) quiet: bool,
    /// Print no progress.
    no_progress: bool,
    /// Whether remarks are written to a log.
    is_service: bool,
}

/// Returns this process's user at its start.
pub(crate) fn who_at_start() -> Who {
    Who::this_process()
}

/// Returns the directory of the store that an option names, or the default one.
pub(crate) fn store_directory(named: Option<&Path>, who: Who) -> anyhow::Result<PathBuf> {
    if let Some(directory) = named {
        return std::path::absolute(directory)
            .with_context(|| format!("\"{}\" is not a path", directory.display()));
    }
    if who.is_host_root() {
        return Ok(PathBuf::from(ROOTS));
    }
    // Source: XDG Base Directory Specification 0.8, which says that relative values must be ignored.
    let data = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
    let data = data.or_else(|| home(who).map(|it| it.join(".local/share")));
    let data = data.context("no store: use --store DIR, or set QUIRE_STORE or HOME")?;
    Ok(data.join("quire"))
}

/// Returns the home directory of this process's user from `HOME`, or else from `/etc/passwd`, because mount(8)
/// calls helpers without variables.
pub(crate) fn home(who: Who) -> Option<PathBuf> {
    if let Some(home) = std::env::var_os("HOME") {
        return Some(home.into());
    }
    // In a user namespace the same number is another user.
    let is_known = who.namespace == UserNamespace::Initial;
    let names = std::fs::read_to_string("/etc/passwd").ok().filter(|_| is_known)?;
    let own = accounts(&names).find(|it| it.number == who.user)?;
    own.home.map(PathBuf::from)
}

/// The store of the host's root.
const ROOTS: &str = "/var/lib/quire";

/// Returns the stores that options name, and root's store if it is shared with this user.
pub(crate) fn shared_stores(named: &[PathBuf], who: Who) -> anyhow::Result<Vec<SharedStore>> {
    let find = |it: &PathBuf| Ok(SharedStore::for_directory(&std::path::absolute(it)?, who)?);
    let mut found: Vec<_> = named.iter().map(find).collect::<anyhow::Result<_>>()?;
    if !who.is_host_root() {
        found.extend(SharedStore::for_directory(Path::new(ROOTS), who));
    }
    Ok(found)
}

/// Returns the reason why root's store is not used although it is shared.
pub(crate) fn refusal_of_roots(who: Who) -> Option<String> {
    match SharedStore::for_directory(Path::new(ROOTS), who) {
        Err(
            error @ (NotShared::Owner { .. } | NotShared::Writable { .. } | NotShared::Unproven(_)),
        ) => Some(error.to_string()),
        _ => None,
    }
}

/// Default log level and format.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Log {
    /// Warnings without the time, because the caller reads them at once.
    OfCommand,
    /// Events of at least this level. Each line contains its time in UTC, because it may be read days later, and not
    /// all logs go to journald.
    #[cfg(feature = "serve")]
    OfService(&'static str),
}

impl Log {
    const fn level(self) -> &'static str {
        match self {
            Self::OfCommand => "warn",
            #[cfg(feature = "serve")]
            Self::OfService(level) => level,
        }
    }

    const fn is_service(self) -> bool {
        match self {
            Self::OfCommand => false,
            #[cfg(feature = "serve")]
            Self::OfService(_) => true,
        }
    }
}

impl Context {
    /// Creates the context and starts logging. `outside` is this process's user before it entered its own
    /// namespace.
    pub(crate) fn new(
        global: Global,
        shared: Vec<SharedStore>,
        log: Log,
        who: Who,
        outside: Who,
    ) -> Self {
        let level = match (global.quiet, global.verbose) {
            (true, _) => "error",
            (false, 0) => log.level(),
            (false, 1) => "info",
            (false, _) => "debug",
        };
        let chosen = std::env::var("QUIRE_LOG").ok().and_then(|it| it.parse().ok());
        // An `EnvFilter` would need a library for regular expressions, to filter by fields of spans.
        let filter: Targets = chosen.or_else(|| level.parse().ok()).unwrap_or_default();
        let lines = tracing_subscriber::fmt::layer()
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .with_target(false);
        let subscriber = tracing_subscriber::registry().with(filter);
        match log.is_service() {
            false => subscriber.with(lines.without_time()).init(),
            true => subscriber.with(lines).init(),
        }
        let sealing = global.seal.map(|seal| match seal {
            Seal::Verity => Sealing::Verity,
            Seal::Immutable => Sealing::VerityOrImmutable,
        });
        Self {
            store: global.store,
            shared,
            policy: global.policy,
            who,
            outside,
            sealing,
            object_hash: global.object_hash.map(|hash| match hash {
                ObjectHash::Sha256 => Algorithm::Sha256,
                ObjectHash::Sha512 => Algorithm::Sha512,
            }),
            json: global.json,
            quiet: global.quiet,
            no_progress: global.no_progress,
            is_service: log.is_service(),
        }
    }

    pub(crate) fn store_directory(&self) -> anyhow::Result<PathBuf> {
        store_directory(self.store.as_deref(), self.who)
    }

    /// Whether the command line or the environment names the store.
    pub(crate) const fn names_store(&self) -> bool {
        self.store.is_some()
    }

    /// Returns this process's user, perhaps in a namespace.
    pub(crate) const fn who(&self) -> Who {
        self.who
    }

    /// Returns this process's user on the host.
    pub(crate) const fn outside(&self) -> Who {
        self.outside
    }

    /// Returns the policy file that the user named.
    pub(crate) fn policy(&self) -> Option<&Path> {
        self.policy.as_deref()
    }

    /// Returns the stores that other users share with this user.
    pub(crate) fn shared(&self) -> &[SharedStore] {
        &self.shared
    }

    /// Opens the first store that has an image of this name: the user's own, or a shared one. If none has it, opens
    /// the user's own.
    pub(crate) fn open_with(&self, name: &str) -> anyhow::Result<Store> {
        let own = self.open(OpenOptions::read());
        let is_absent = |store: &Store| resolve(store, name).is_err_and(|it| it.is_absent());
        if own.as_ref().is_ok_and(|store| !is_absent(store)) {
            return own;
        }
        if own.as_ref().is_err_and(|error| !is_absent_store(error)) {
            return own;
        }
        self.open_shared().find(|store| resolve(store, name).is_ok()).map_or(own, Ok)
    }

    /// Opens the shared stores. If a store cannot be opened, this only prints a remark, because its owner must fix
    /// that.
    pub(crate) fn open_shared(&self) -> impl Iterator<Item = Store> {
        self.shared.iter().filter_map(|shared| {
            let refused = |error: &store::StoreError| {
                let (path, error) = (shared.path().display(), report::chain(error));
                self.remark(&format!("ignoring the shared store {path}: {error}"));
            };
            shared.open(self.who).inspect_err(refused).ok()
        })
    }

    /// Returns these options, with the algorithm of `--object-hash` for a store that is made.
    pub(crate) fn with_hash(&self, options: OpenOptions) -> OpenOptions {
        let create = match (options.create, self.object_hash) {
            (Create::IfAbsent(_), Some(algorithm)) => Create::IfAbsent(algorithm),
            (create, _) => create,
        };
        OpenOptions { create, ..options }
    }

    pub(crate) fn open(&self, options: OpenOptions) -> anyhow::Result<Store> {
        let sealing = self.sealing.or(options.sealing);
        let directory = self.store_directory()?;
        let is_new = options.create != Create::Never && !directory.join("meta").exists();
        let options = OpenOptions { sealing, ..self.with_hash(options) };
        let store = Store::open(&directory, self.who, options)?;
        // Commands that make no store work with any, also if the environment has a wish for new ones.
        let may_make = options.create != Create::Never;
        if let Some(asked) = self.object_hash.filter(|it| may_make && *it != store.algorithm()) {
            anyhow::bail!(
                "the store in {} names its objects by {}, not {asked}: leave out --object-hash, or choose another \
                --store",
                directory.display(),
                store.algorithm()
            );
        }
        if is_new {
            self.tell_who_checks(&directory);
        }
        if self.who.is_host_root() {
            // One exposure is enough: `doctor` and `fsck` list all.
            if let Some(exposure) = store.exposure()?.first() {
                self.remark(&exposure.to_string());
            }
        }
        Ok(store)
    }

    /// Opens the user's own store in another directory, for reading.
    pub(crate) fn open_at(&self, directory: &Path) -> anyhow::Result<Store> {
        let directory = store_directory(Some(directory), self.who)?;
        Ok(Store::open(&directory, self.who, OpenOptions::read())?)
    }

    /// Opens the store for a verb that has nothing to do if there is no store. Returns `None` without a store if an
    /// option such as `--force` allows missing things. Otherwise, the usual error is returned.
    pub(crate) fn open_for(
        &self,
        options: OpenOptions,
        may_be_absent: bool,
    ) -> anyhow::Result<Option<Store>> {
        match self.open(options) {
            Err(error) if may_be_absent && is_absent_store(&error) => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Prints a remark if the kernel cannot verify reads. It is printed once, for a new store, and not at each
    /// `run`.
    fn tell_who_checks(&self, directory: &Path) {
        let Ok(opened) = std::fs::File::open(directory) else { return };
        let has_verity = kernel::features::fs_verity(opened.as_fd()).can == Can::Yes;
        let why = match KernelVersion::running() {
            _ if !has_verity => "no fs-verity on its file system",
            Some(version) if version < OVERLAY_VERITY => "Linux is older than 6.6",
            _ => return,
        };
        self.remark(&format!(
            "the kernel does not check reads from this store ({why}): Quire checks its files at \
            import, and by `quire verify`"
        ));
    }

    /// Returns the directories in which programs are searched, from `PATH`.
    #[expect(clippy::unused_self, reason = "the environment of a verb comes from here")]
    pub(crate) fn search(&self) -> std::ffi::OsString {
        std::env::var_os("PATH").unwrap_or_default()
    }

    /// Prints a remark for people as one line on standard error. A service writes it to its log.
    pub(crate) fn remark(&self, text: &str) {
        if self.is_service {
            tracing::warn!("{}", report::plain(text));
        } else if !self.quiet {
            report::error_line(&report::plain(&format!("quire: {text}")));
        }
    }

    /// Returns the same context, without progress.
    pub(crate) fn without_progress(&self) -> Self {
        Self { no_progress: true, ..self.clone() }
    }

    /// Returns whether progress bars may be drawn.
    pub(crate) fn draws(&self) -> bool {
        !self.quiet && !self.no_progress && !self.json && std::io::stderr().is_terminal()
    }

    /// Creates the progress display that the options ask for.
    pub(crate) fn progress(&self) -> Progress {
        let is_silent = self.is_quiet() || self.json || self.no_progress;
        let shown = match (self.draws(), is_silent) {
            (true, _) => Shown::Bars,
            (false, true) => Shown::Nothing,
            (false, false) => Shown::Lines,
        };
        Progress::new(shown, self.is_quiet())
    }

    /// Returns whether only errors are printed.
    pub(crate) const fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Prints the error with its causes, and a hint for the next step if there is one.
    /// With `--json`, prints a [`FailureReport`] with the exit code instead.
    pub(crate) fn complain(&self, error: &anyhow::Error, exit_code: u8) {
        let hint = self.elsewhere(error).or_else(|| hint(error)).or_else(|| self.room_hint(error));
        let mut hints: Vec<_> = hint.or_else(|| self.permission_hint(error)).into_iter().collect();
        hints.extend(filestore_hint(error, self.outside).map(str::to_owned));
        if self.json {
            return FailureReport::new(error, &hints, exit_code).print();
        }
        // A newline in a name must not look like another error.
        report::error_line(&report::plain(&format!("quire: {error:#}")));
        for hint in hints {
            report::error_line(&format!("  {}", report::plain(&hint)));
        }
    }

    /// Returns a hint for an image that a verb did not find in the user's own store, but that is in a shared one.
    fn elsewhere(&self, error: &anyhow::Error) -> Option<String> {
        let cause = error.chain().find_map(|cause| cause.downcast_ref::<Unresolved>())?;
        let name = cause.absent()?;
        let found = self.open_shared().find(|store| resolve(store, name).is_ok());
        if let Some(store) = found {
            let path = store.path().display();
            return Some(format!(
                "it is in the shared store {path}: `quire pull` copies it to your own store"
            ));
        }
        match self.shared.is_empty() && !self.outside.is_host_root() {
            true => refusal_of_roots(self.outside),
            false => None,
        }
    }

    /// Returns a hint for a file system that is full, read-only or over its quota: its path, and what may help.
    fn room_hint(&self, error: &anyhow::Error) -> Option<String> {
        let refusal = refusal(error)?;
        let outside = error.downcast_ref::<Outside>();
        if matches!(outside, Some(Outside::Stdout)) || report::is_of_output(error) {
            return None;
        }
        let disk = error.chain().find_map(|cause| cause.downcast_ref::<store::DiskError>());
        let path = match (outside, disk) {
            (Some(Outside::File(path) | Outside::Layout(path)), _) => path.clone(),
            (_, Some(disk)) => disk.path.clone(),
            _ => self.store_directory().ok()?,
        };
        // The file may be removed, or may never have existed.
        let path = std::path::absolute(path).ok()?;
        let place = path.ancestors().find(|it| it.is_dir())?.canonicalize().ok()?;
        let device = |path: &Path| std::fs::metadata(path).map(|it| it.dev()).ok();
        let of = device(&place);
        let top = place.ancestors().take_while(|it| device(it) == of).last()?.display();
        if let Some(outside) = outside {
            let why = match refusal {
                Errno::ROFS => format!("the file system at {top} is read-only"),
                Errno::DQUOT => format!("the quota at {top} is exhausted"),
                _ => format!("the file system at {top} was full"),
            };
            let elsewhere = match outside {
                Outside::Layout(_) => "use a directory elsewhere",
                Outside::File(_) | Outside::Stdout => {
                    "use a file elsewhere, or - for standard output"
                }
            };
            return Some(format!("{why}: {elsewhere}"));
        }
        match refusal {
            Errno::ROFS => Some(format!(
                "the file system at {top} is read-only: mount it for writing, or use --store DIR \
                for a store elsewhere"
            )),
            Errno::DQUOT => Some(format!(
                "the quota at {top} is exhausted: `quire gc` frees unused data, `quire gc \
                --unfinished` also data of interrupted pulls"
            )),
            _ => {
                let free = rustix::fs::statvfs(&place).ok()?;
                let bytes = report::size(free.f_bavail.saturating_mul(free.f_frsize));
                let inodes = match free.f_files {
                    0 => String::new(),
                    _ => format!(" and {} inodes", free.f_favail),
                };
                Some(format!(
                    "the file system at {top} was full ({bytes}{inodes} are free after removing \
                    the data of this command): `quire gc` frees unused data, `quire gc \
                    --unfinished` also data of interrupted pulls"
                ))
            }
        }
    }

    /// Returns advice for an operation for which this user lacks the permission, but another user has it.
    fn permission_hint(&self, error: &anyhow::Error) -> Option<String> {
        let user = self.who.user;
        if user == 0 || !is_refused(error) {
            return None;
        }
        let store = self.store_directory().ok()?;
        // Owner of the store, or of the nearest parent directory that this user can look up.
        let owner = store.ancestors().find_map(|it| std::fs::metadata(it).ok())?.uid();
        let store = store.display();
        Some(match owner {
            owner if owner == user => {
                "only root can do this: use sudo and root's store, and get the image into it with \
                `sudo quire pull` or `sudo quire import`"
                    .to_owned()
            }
            0 => format!(
                "{store} belongs to another user: use sudo, or --store DIR for a store \
                that belongs to you"
            ),
            _ => format!(
                "{store} belongs to another user: use --store DIR for a store that belongs to you"
            ),
        })
    }
}

/// The location of an error outside of the store.
#[derive(Debug)]
pub(crate) enum Outside {
    Stdout,
    /// The directory of the output file.
    File(PathBuf),
    /// The directory of the OCI layout.
    Layout(PathBuf),
}

impl Outside {
    /// Adds this location to the error if a file system refused a write, unless it was the file system of temporary
    /// files.
    pub(crate) fn note(self, error: anyhow::Error) -> anyhow::Error {
        let is_scratch = |it: &ExportError| matches!(it, ExportError::Scratch { .. });
        let is_scratch = error.chain().any(|it| it.downcast_ref().is_some_and(is_scratch));
        match refusal(&error) {
            Some(_) if !is_scratch => error.context(self),
            _ => error,
        }
    }
}

impl std::fmt::Display for Outside {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::File(directory) | Self::Layout(directory) => {
                write!(f, "cannot write in {}", directory.display())
            }
            Self::Stdout => f.write_str("cannot write to standard output"),
        }
    }
}

/// Returns whether the error is that there is no store.
pub(crate) fn is_absent_store(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(store::StoreError::Absent(_)))
}

/// Returns whether a cause is a missing permission.
fn is_refused(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let io = cause.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
        let errno = cause.downcast_ref::<Errno>().map(|it| it.kind());
        io.or(errno) == Some(ErrorKind::PermissionDenied)
    })
}

/// Returns the current time with the precision of the kernel.
pub(crate) fn moment() -> store::Moment {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let since = since.unwrap_or_default();
    let seconds = i64::try_from(since.as_secs()).unwrap_or_default();
    store::Moment { seconds, nanoseconds: since.subsec_nanos() }
}

/// Returns the current time in whole seconds since 1970.
pub(crate) fn now() -> store::Seconds {
    store::Seconds(moment().seconds)
}
