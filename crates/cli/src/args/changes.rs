//! Changes to the configuration of an image that is made.

use anyhow::Context as _;
use clap::Args;
use container::life::signal::signal_number;
use transfer::commit::Change;

// Options of verbs that make an image.
#[derive(Debug, Args)]
pub(crate) struct ChangeOptions {
    /// Change the image's configuration by a line of a Dockerfile: CMD, ENTRYPOINT, ENV, EXPOSE, LABEL, STOPSIGNAL,
    /// USER, VOLUME or WORKDIR
    #[arg(short, long, value_name = "LINE")]
    pub(crate) change: Vec<Change>,
}

impl ChangeOptions {
    /// Checks what only the start of a container would find.
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        for change in &self.change {
            if let Change::StopSignal(signal) = change {
                signal_number(signal).context("--change STOPSIGNAL")?;
            }
        }
        Ok(())
    }
}
