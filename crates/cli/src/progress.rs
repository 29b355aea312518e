//! Progress of an import: bars on a terminal, lines elsewhere.

use std::sync::Mutex;

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};
use oci::import::Event;

use crate::context::Context;
use crate::report;

/// Shows events as they come, from any thread.
pub(crate) struct Progress {
    how: How,
    layers: Mutex<Vec<Layer>>,
}

enum How {
    Bars(MultiProgress),
    Lines,
    Silent,
}

struct Layer {
    bytes: Option<u64>,
    bar: Option<ProgressBar>,
}

impl Progress {
    pub(crate) fn new(context: &Context) -> Self {
        let how = match (context.draws(), context.is_quiet() || context.json) {
            (true, _) => How::Bars(MultiProgress::new()),
            (false, true) => How::Silent,
            (false, false) => How::Lines,
        };
        Self { how, layers: Mutex::new(Vec::new()) }
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
                *layers = sizes.iter().map(|bytes| Layer { bytes: *bytes, bar: None }).collect();
            }
            Event::Started { layer } => {
                let Some(it) = layers.get_mut(layer) else { return };
                let size =
                    it.bytes.map_or_else(String::new, |it| format!(", {}", report::size(it)));
                line(format!("layer {} of {count}{size}", layer + 1));
                if let How::Bars(all) = &self.how {
                    it.bar = Some(all.add(bar(layer, it.bytes)));
                }
            }
            Event::Read { layer, bytes } => {
                if let Some(bar) = layers.get(layer).and_then(|it| it.bar.as_ref()) {
                    bar.inc(bytes);
                }
            }
            Event::Reused { layer } => {
                line(format!("layer {} of {count} is here already", layer + 1));
            }
            Event::Done { layer } => {
                if let Some(bar) = layers.get(layer).and_then(|it| it.bar.as_ref()) {
                    bar.finish();
                }
            }
            Event::Walking => line("reading the files".to_owned()),
            Event::Writing => line("writing the image".to_owned()),
            Event::Committing => line("waiting for the disk".to_owned()),
            _ => {}
        }
    }

    /// Takes the bars away.
    pub(crate) fn finish(&self) {
        if let How::Bars(all) = &self.how {
            // A terminal that is gone needs no cleaning.
            let _cleared = all.clear();
        }
    }
}

fn bar(layer: usize, bytes: Option<u64>) -> ProgressBar {
    let template = match bytes {
        Some(_) => {
            "{prefix} [{bar:30}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} left"
        }
        None => "{prefix} {spinner} {binary_bytes} {binary_bytes_per_sec}",
    };
    let style = ProgressStyle::with_template(template).expect("the template is a constant");
    ProgressBar::new(bytes.unwrap_or(0))
        .with_style(style.progress_chars("=> "))
        .with_prefix(format!("layer {}", layer + 1))
}
