//! What every verb is given: where the store is, and how to talk.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use store::{OpenOptions, Store};

use crate::args::Global;
use crate::report;

/// The surroundings of a verb.
#[derive(Debug)]
pub(crate) struct Context {
    store: Option<PathBuf>,
    /// Print JSON.
    pub(crate) json: bool,
    quiet: bool,
}

impl Context {
    pub(crate) fn new(global: Global) -> Self {
        let level = match (global.quiet, global.verbose) {
            (true, _) => "error",
            (false, 0) => "warn",
            (false, 1) => "info",
            (false, _) => "debug",
        };
        let filter = tracing_subscriber::EnvFilter::builder()
            .with_env_var("QUIRE_LOG")
            .try_from_env()
            .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new(level));
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(std::io::stderr().is_terminal())
            .without_time()
            .with_target(false)
            .init();
        Self { store: global.store, json: global.json, quiet: global.quiet }
    }

    /// The directory of the store, and whether the user named it.
    pub(crate) fn store_directory(&self) -> anyhow::Result<PathBuf> {
        if let Some(directory) = &self.store {
            return std::path::absolute(directory)
                .with_context(|| format!("\"{}\" is no path", directory.display()));
        }
        if rustix::process::geteuid().is_root() {
            return Ok(PathBuf::from("/var/lib/quire"));
        }
        // Source: XDG Base Directory Specification 0.8: relative values are to be ignored.
        let data =
            std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|it| it.is_absolute());
        let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/share"));
        let data = data.or_else(home);
        let data = data.context("no store: say --store DIR, or set QUIRE_STORE or HOME")?;
        Ok(data.join("quire"))
    }

    /// Opens the store.
    pub(crate) fn open(&self, options: OpenOptions) -> anyhow::Result<Store> {
        Ok(Store::open(&self.store_directory()?, options)?)
    }

    /// A remark that a person may want to read, in one line on standard error.
    pub(crate) fn remark(&self, text: &str) {
        if !self.quiet {
            report::error_line(&format!("quire: {text}"));
        }
    }

    /// Whether progress may be drawn.
    pub(crate) fn draws(&self) -> bool {
        !self.quiet && !self.json && std::io::stderr().is_terminal()
    }

    /// Whether anything but errors is said.
    pub(crate) const fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// The error, its causes, and the next step where there is a usual one.
    #[expect(clippy::unused_self, reason = "errors are told whatever the flags say")]
    pub(crate) fn complain(&self, error: &anyhow::Error) {
        report::error_line(&format!("quire: {error:#}"));
        if let Some(hint) = hint(error) {
            report::error_line(&format!("  {hint}"));
        }
    }
}

/// The next step.
fn hint(error: &anyhow::Error) -> Option<String> {
    error.chain().find_map(|cause| {
        if let Some(store::ResolveError::Absent { nearest, .. }) = cause.downcast_ref() {
            if nearest.is_empty() {
                return Some("`quire images` lists what there is".to_owned());
            }
            let nearest: Vec<_> = nearest.iter().map(ToString::to_string).collect();
            return Some(format!("did you mean {}?", nearest.join(" or ")));
        }
        if let Some(store::StoreError::Absent(_)) = cause.downcast_ref() {
            return Some("`quire import` makes one; --store says where".to_owned());
        }
        None
    })
}

/// The time now, in whole seconds since 1970.
pub(crate) fn now() -> store::Seconds {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    store::Seconds(since.ok().and_then(|it| i64::try_from(it.as_secs()).ok()).unwrap_or(0))
}
