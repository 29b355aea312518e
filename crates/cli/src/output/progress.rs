//! Shows the progress of an import: as bars on a terminal, as lines elsewhere.

use std::os::fd::AsFd as _;
use std::sync::Mutex;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use transfer::progress::Event;

use crate::output::report;

/// Shows events as they arrive, from any thread.
pub(crate) struct Progress {
    how: How,
    is_quiet: bool,
    layers: Mutex<Vec<LayerProgress>>,
    /// Bar for all layers together, if there are several of known size.
    total: Mutex<Option<ProgressBar>>,
}

enum How {
    Bars(MultiProgress),
    Lines,
    /// Each event is a line of JSON on standard output.
    Events,
    Silent,
}

struct LayerProgress {
    bytes: Option<u64>,
    /// Bytes read so far.
    read: u64,
    /// Bytes that the last event reported.
    told: u64,
    /// Bytes that are in the store already.
    skipped: u64,
    bar: Option<ProgressBar>,
}

/// A progress event of `pull --json` and `push --json`; each is printed as one line.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "event", rename_all = "camelCase")]
pub(crate) enum ProgressReport<'a> {
    /// The layers are known. The other events number them from 1.
    Layers {
        /// Compressed size of each layer. Null if it is unknown.
        #[cfg_attr(test, schemars(with = "Vec<Option<report::Bytes>>"))]
        bytes: &'a [Option<u64>],
    },
    /// Reading a layer has started.
    Started {
        /// Number of the layer.
        layer: usize,
    },
    /// More of a layer was read. There is at least one such event for each MiB.
    Read {
        /// Number of the layer.
        layer: usize,
        /// Bytes read so far.
        bytes: report::Bytes,
    },
    /// A part of a layer is in the store already, and is not read again.
    Skipped {
        /// Number of the layer.
        layer: usize,
        /// Size of that part.
        bytes: report::Bytes,
    },
    /// The store has the whole layer already.
    Reused {
        /// Number of the layer.
        layer: usize,
    },
    /// A layer did not match its digest and is read again from the start.
    Again {
        /// Number of the layer.
        layer: usize,
    },
    /// A layer is complete.
    Done {
        /// Number of the layer.
        layer: usize,
    },
    /// The image is for another platform than this machine.
    Platform {
        /// Platform of the image, such as `linux/arm64`.
        image: String,
        /// Platform of this machine.
        wanted: String,
    },
    /// The image is being written.
    Writing {},
    /// The store is syncing its files to the disk.
    Committing {},
    /// A request to the registry failed and is repeated after a pause.
    #[cfg(feature = "registry")]
    Pause {
        /// Host that failed.
        host: &'a str,
        /// The request that failed.
        what: &'a str,
        /// Length of the pause.
        seconds: report::Seconds,
        /// Reason of the failure.
        reason: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Shown {
    Bars,
    Lines,
    Nothing,
}

/// Bytes of a layer between two events that report its progress.
const STEP: u64 = 1 << 20;

impl Progress {
    /// Creates the progress display. If `is_quiet`, it prints no remarks.
    pub(crate) fn new(shown: Shown, is_quiet: bool) -> Self {
        let how = match shown {
            Shown::Bars => How::Bars(MultiProgress::new()),
            Shown::Lines => How::Lines,
            Shown::Nothing => How::Silent,
        };
        Self { how, is_quiet, layers: Mutex::new(Vec::new()), total: Mutex::new(None) }
    }

    /// If `wanted`, prints events for programs instead of bars or lines.
    #[cfg_attr(
        not(feature = "registry"),
        expect(dead_code, reason = "only pulls and pushes print events")
    )]
    pub(crate) fn with_events(mut self, wanted: bool) -> Self {
        if wanted {
            self.how = How::Events;
        }
        self
    }

    /// Prints a remark above the bars.
    pub(crate) fn remark(&self, text: &str) {
        if self.is_quiet {
            return;
        }
        let print = || report::error_line(&format!("quire: {text}"));
        match &self.how {
            How::Bars(all) => all.suspend(print),
            How::Lines | How::Events | How::Silent => print(),
        }
    }

    /// Reports that a request to a registry is repeated after a pause.
    #[cfg(feature = "registry")]
    pub(crate) fn pause(&self, pause: &oci::registry::Pause<'_>) {
        self.remark(&pause.to_string());
        self.event(&ProgressReport::Pause {
            host: pause.host,
            what: pause.what,
            seconds: report::Seconds(pause.wait.as_secs_f64()),
            reason: pause.reason(),
        });
    }

    /// Prints an event. A closed output does not stop the work.
    fn event(&self, event: &ProgressReport<'_>) {
        if let How::Events = self.how {
            let _unheard = report::json_line(event);
        }
    }

    pub(crate) fn tell(&self, event: Event<'_>) {
        let Ok(mut layers) = self.layers.lock() else { return };
        let count = layers.len();
        let line = |text: String| {
            if let How::Lines = self.how {
                report::error_line(&text);
            }
        };
        match event {
            Event::Layers(sizes) => {
                let layer = |bytes: &Option<u64>| LayerProgress {
                    bytes: *bytes,
                    read: 0,
                    told: 0,
                    skipped: 0,
                    bar: None,
                };
                *layers = sizes.iter().map(layer).collect();
                self.event(&ProgressReport::Layers { bytes: sizes });
                let sum: Option<u64> = sizes.iter().copied().sum();
                if let (How::Bars(all), Some(sum), Ok(mut total)) =
                    (&self.how, sum, self.total.lock())
                    && sizes.len() > 1
                {
                    *total = Some(all.add(bar("all", Some(sum))));
                }
            }
            Event::Started { layer } => {
                let Some(it) = layers.get_mut(layer) else { return };
                let size =
                    it.bytes.map_or_else(String::new, |it| format!(", {}", report::size(it)));
                line(format!("layer {} of {count}{size}", layer + 1));
                self.event(&ProgressReport::Started { layer: layer + 1 });
                if let How::Bars(all) = &self.how {
                    it.bar = Some(self.add(all, bar(&named(layer), it.bytes)));
                }
            }
            Event::Read { layer, bytes } => {
                let Some(it) = layers.get_mut(layer) else { return };
                if let Some(bar) = &it.bar {
                    bar.inc(bytes);
                }
                self.with_total(|total| total.inc(bytes));
                // The end of a layer reports 0 bytes, which is no progress.
                if bytes == 0 {
                    return;
                }
                it.read += bytes;
                if it.read - it.told >= STEP || Some(it.read) == it.bytes {
                    it.told = it.read;
                    self.event(&ProgressReport::Read {
                        layer: layer + 1,
                        bytes: report::Bytes(it.read),
                    });
                }
            }
            Event::Skipped { layer, bytes } => {
                let Some(it) = layers.get_mut(layer) else { return };
                it.skipped = bytes;
                let here = report::size(bytes);
                line(format!(
                    "layer {} of {count}: {here} of it are already in the store",
                    layer + 1
                ));
                self.event(&ProgressReport::Skipped {
                    layer: layer + 1,
                    bytes: report::Bytes(bytes),
                });
                // The bar is narrow, so its message is only the size of the data that the store has already. Speed
                // and remaining time are computed from the bytes that are still to be read.
                if let Some(bar) = &it.bar {
                    bar.dec_length(bytes);
                    bar.set_message(format!(" + {here}"));
                }
                self.with_total(|total| total.dec_length(bytes));
            }
            Event::Reused { layer } => {
                line(format!("layer {} of {count} is already in the store", layer + 1));
                self.event(&ProgressReport::Reused { layer: layer + 1 });
                let bytes = layers.get(layer).and_then(|it| it.bytes).unwrap_or(0);
                self.with_total(|total| total.dec_length(bytes));
                if let How::Bars(all) = &self.how {
                    let bar = self.add(all, bar(&named(layer), None).with_style(style(SAID)));
                    bar.finish_with_message("already in the store");
                }
            }
            Event::Again { layer } => {
                line(format!("layer {} of {count} failed its check: trying again", layer + 1));
                self.event(&ProgressReport::Again { layer: layer + 1 });
                let Some(it) = layers.get_mut(layer) else { return };
                if let Some(bar) = &it.bar {
                    bar.set_position(0);
                    bar.inc_length(it.skipped);
                    bar.set_message("");
                }
                self.with_total(|total| {
                    total.dec(it.read);
                    total.inc_length(it.skipped);
                });
                (it.read, it.told, it.skipped) = (0, 0, 0);
            }
            Event::Done { layer } => {
                self.event(&ProgressReport::Done { layer: layer + 1 });
                if let Some(bar) = layers.get(layer).and_then(|it| it.bar.as_ref()) {
                    match count > BARS_MAX {
                        true => bar.finish_and_clear(),
                        false => bar.finish(),
                    }
                }
            }
            Event::OtherPlatform { image, wanted } => {
                self.event(&ProgressReport::Platform {
                    image: image.to_string(),
                    wanted: wanted.to_string(),
                });
                self.remark(&format!(
                    "the image is for {image}, but this machine is {wanted}: its programs run \
                    only if binfmt_misc has an emulator for them"
                ));
            }
            Event::Walking => {
                line("reading the files".to_owned());
                if let (How::Bars(all), Ok(mut total)) = (&self.how, self.total.lock()) {
                    let files = total.get_or_insert_with(|| all.add(bar("files", None)));
                    // The spinner also turns while names are read.
                    files.enable_steady_tick(TICK);
                }
            }
            Event::FileRead { bytes } => self.with_total(|total| total.inc(bytes)),
            Event::Writing => {
                line("writing the image".to_owned());
                self.say("writing the image");
                self.event(&ProgressReport::Writing {});
            }
            Event::Committing => {
                line("waiting for the disk".to_owned());
                self.say("waiting for the disk");
                self.event(&ProgressReport::Committing {});
            }
            _ => {}
        }
    }

    /// Changes the bar of all layers together.
    fn with_total(&self, change: impl FnOnce(&ProgressBar)) {
        if let Ok(total) = self.total.lock()
            && let Some(total) = &*total
        {
            change(total);
        }
    }

    /// Shows the current step after all layers were read.
    fn say(&self, text: &'static str) {
        self.with_total(|total| {
            total.set_style(style(SAID));
            total.set_message(text);
        });
    }

    /// Adds a layer's bar above the bar of all layers.
    fn add(&self, all: &MultiProgress, bar: ProgressBar) -> ProgressBar {
        match self.total.lock() {
            Ok(total) => match &*total {
                Some(total) => all.insert_before(total, bar),
                None => all.add(bar),
            },
            Err(_poisoned) => all.add(bar),
        }
    }

    /// Removes the bars.
    pub(crate) fn finish(&self) {
        if let How::Bars(all) = &self.how {
            // Ignore a failure: a closed terminal needs no cleanup.
            let _cleared = all.clear();
            // A bar that is dropped before its end would draw all bars once more.
            all.set_draw_target(ProgressDrawTarget::hidden());
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.finish();
    }
}

/// Returns the label of a layer, counted from 1.
fn named(layer: usize) -> String {
    format!("layer {}", layer + 1)
}

/// If there are more layers than this, the bars of finished layers are hidden, because a terminal has 24 lines.
const BARS_MAX: usize = 16;

/// Time between two frames of a spinner.
const TICK: Duration = Duration::from_millis(200);

/// All columns except the bar have a fixed width, so that 80 columns are enough and the text does not move.
const KNOWN: &str = "{prefix:9} [{wide_bar}] {binary_bytes:>11} of {binary_total_bytes:11} {binary_bytes_per_sec:>13} \
                     {eta:>4} left{msg}";
/// For narrow terminals: a longer line would wrap, and each redraw would leave a copy of it.
const KNOWN_NARROW: &str =
    "{prefix:9} {binary_bytes:>11} of {binary_total_bytes:11} {percent:>3}%{wide_msg}";
const UNKNOWN: &str = "{prefix:9} {spinner} {binary_bytes:>11} {binary_bytes_per_sec:>13}";
const SAID: &str = "{prefix:9} {wide_msg}";

/// Columns that [`KNOWN`] needs without its message, with a bar of 10.
const WIDE: u16 = 80;

/// Returns the template of a bar of known length, for a terminal of this many columns.
const fn known(columns: u16) -> &'static str {
    if columns < WIDE { KNOWN_NARROW } else { KNOWN }
}

fn bar(name: &str, bytes: Option<u64>) -> ProgressBar {
    let size = kernel::terminal::size(std::io::stderr().as_fd());
    let columns = size.map_or(WIDE, |it| it.ws_col);
    let template = if bytes.is_some() { known(columns) } else { UNKNOWN };
    ProgressBar::new(bytes.unwrap_or(0)).with_style(style(template)).with_prefix(name.to_owned())
}

fn style(template: &str) -> ProgressStyle {
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    style.progress_chars("=> ")
}
