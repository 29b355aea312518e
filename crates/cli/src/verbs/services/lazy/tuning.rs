//! Settings of the service for lazy devices, from options and the settings file.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use serve::lazy::{Completion, READERS_WAIT, SourcePatience};
use store::DEFAULT_TRACE;

use crate::verbs::services::notify::{self, ServiceStep};
use crate::verbs::services::service_config::{CompleteAfter, ServeFile, ServeSettings};

/// How long an image is in use before the rest of it is fetched. Most starts are over by then.
const COMPLETE_AFTER: Duration = Duration::from_secs(10);

/// The settings in force, which can change while the service runs.
#[derive(Debug)]
pub(crate) struct Tuning {
    file: ServeFile,
    /// The option, which overrides the file.
    lazy_timeout: Option<u32>,
    always_complete: bool,
    complete: Mutex<Completion>,
    patience: SourcePatience,
    prefetch: Mutex<Option<String>>,
    is_ready: AtomicBool,
}

impl Tuning {
    /// Reads the settings from the file and the options.
    pub(crate) fn new(args: &crate::verbs::services::serve::args::Serve) -> anyhow::Result<Self> {
        let tuning = Self {
            file: ServeFile::new(args.config.as_deref()),
            lazy_timeout: args.lazy_timeout,
            always_complete: args.complete,
            complete: Mutex::default(),
            patience: SourcePatience::default(),
            prefetch: Mutex::default(),
            is_ready: AtomicBool::new(false),
        };
        match tuning.file.load() {
            Ok(settings) => tuning.set(settings),
            // Programs wait for a restarted service, so it starts even if the file is invalid.
            Err(error) if args.again => {
                let error = format!("{error:#}");
                tracing::error!(error, "starting with the default settings");
                tuning.set(ServeSettings::default());
            }
            Err(error) => return Err(error),
        }
        Ok(tuning)
    }

    fn set(&self, settings: ServeSettings) {
        let ServeSettings {
            lazy_timeout,
            prefetch,
            complete,
            complete_after,
            snapshotter: _,
            mounts: _,
        } = settings;
        let complete = match complete_after {
            _ if self.always_complete || complete.unwrap_or_default() => Completion::Always,
            Some(CompleteAfter::Never) => Completion::Asked,
            Some(CompleteAfter::Seconds(it)) => Completion::After(Duration::from_secs(it.into())),
            None => Completion::After(COMPLETE_AFTER),
        };
        *self.complete.lock().unwrap_or_else(PoisonError::into_inner) = complete;
        let seconds = self.lazy_timeout.or(lazy_timeout);
        let wait = seconds.map_or(READERS_WAIT, |it| Duration::from_secs(it.into()));
        self.patience.set_wait(Some(wait).filter(|it| !it.is_zero()));
        *self.prefetch.lock().unwrap_or_else(PoisonError::into_inner) = prefetch;
    }

    pub(crate) const fn patience(&self) -> &SourcePatience {
        &self.patience
    }

    /// Returns which devices are fetched completely.
    pub(crate) fn completion(&self) -> Completion {
        *self.complete.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the trace for mounts that do not name one.
    pub(crate) fn prefetch(&self) -> String {
        let set = self.prefetch.lock().unwrap_or_else(PoisonError::into_inner);
        set.as_deref().unwrap_or(DEFAULT_TRACE).to_owned()
    }

    /// Reports that the service accepts requests.
    pub(crate) fn ready(&self) {
        self.is_ready.store(true, Ordering::Relaxed);
        notify::tell(ServiceStep::Ready);
    }

    /// Reads the file again. If the file is invalid, the settings are not changed.
    pub(crate) fn reload(&self) {
        let is_ready = self.is_ready.load(Ordering::Relaxed);
        if is_ready {
            notify::tell(ServiceStep::Reloading);
        }
        match self.file.load() {
            Ok(settings) => {
                self.set(settings);
                let settings = self.file.lazy().unwrap_or_else(|why| why);
                tracing::info!(settings, "read the settings again");
            }
            Err(error) => {
                let error = format!("{error:#}");
                tracing::error!(error, "keeping the previous settings");
            }
        }
        if is_ready {
            notify::tell(ServiceStep::Ready);
        }
    }
}
