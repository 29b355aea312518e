//! `referrers`: lists artifacts in a registry that refer to an image.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use anyhow::bail;
use clap::Args;
use oci::manifest::{Document, Platform};
use oci::reference::Reference;
use oci::registry::{Referrer, Registry};
use serde::Serialize;

use crate::Answer;
use crate::args::RegistryOptions;
use crate::output::report;
use crate::output::table;
use crate::session::context::Context;
use crate::session::signals::until_signal;
use crate::verbs::VerbArgs;
use crate::verbs::images::registry::pull::{pauses, settings};

// The image whose referrers are listed.
#[derive(Debug, Args)]
pub(crate) struct Referrers {
    /// Image in a registry, such as alpine, ghcr.io/owner/app:1.2 or localhost:5000/app@sha256:…
    pub(crate) reference: String,
    /// List only this type, such as application/spdx+json
    #[arg(long = "type", value_name = "TYPE")]
    pub(crate) kind: Option<String>,
    /// For an index, list the referrers of the image of this platform (os/architecture[/variant]), not of the index
    #[arg(long, value_name = "PLATFORM")]
    pub(crate) platform: Option<String>,
    #[command(flatten)]
    pub(crate) registry: RegistryOptions,
}

impl VerbArgs for Referrers {
    const NAME: &'static str = "referrers";
    const ABOUT: &'static str = "List an image's signatures, SBOMs and attestations in a registry";
    const EXAMPLES: &'static str = "quire referrers ghcr.io/owner/app:1.2";

    fn call(&self, context: &Context) -> anyhow::Result<Answer> {
        referrers(context, self)
    }
}

pub(crate) fn referrers(context: &Context, args: &Referrers) -> anyhow::Result<Answer> {
    let reference: Reference = args.reference.parse()?;
    let platform: Option<Platform> = args.platform.as_deref().map(str::parse).transpose()?;
    let cancel = Arc::new(AtomicBool::new(false));
    let work = || -> anyhow::Result<_> {
        // The client is created now, while signals are blocked, because its thread inherits the signal mask.
        let settings = settings(context.who(), &args.registry, &cancel, pauses(context))?;
        let registry = Registry::new(&reference, &settings)?;
        let subject = subject(context, &registry, &reference, platform.as_ref())?;
        Ok((subject, registry.referrers(&subject, args.kind.as_deref())?))
    };
    let (subject, found) = until_signal(&cancel, work)??;
    let referrers = found.iter().map(ReferrerReport::from_referrer).collect();
    let report = ReferrersReport { subject: subject.to_string(), referrers };
    report::print(context.json, &report, |report, out| {
        let rows: Vec<_> = report.referrers.iter().map(ReferrerReport::row).collect();
        table::print_whole(out, &["DIGEST", "TYPE", "SIZE", "ANNOTATIONS"], &rows, &[2])
    })?;
    Ok(Answer::Yes)
}

/// Returns the digest that the reference resolves to.
fn subject(
    context: &Context,
    registry: &Registry,
    reference: &Reference,
    platform: Option<&Platform>,
) -> anyhow::Result<oci::Digest> {
    let which = match (reference.digest(), platform) {
        (Some(digest), None) => return Ok(*digest),
        (Some(digest), Some(_)) => digest.to_string(),
        (None, _) => reference.tag().unwrap_or(oci::reference::LATEST).to_owned(),
    };
    let fetched = registry.manifest(&which)?;
    match (Document::parse(&fetched.bytes), platform) {
        (Ok(Document::Index(index)), Some(platform)) => Ok(index.choose(platform)?.digest),
        (Ok(Document::Index(_)), None) => {
            context
                .remark(&format!("{reference} is an index: --platform selects one of its images"));
            Ok(fetched.digest)
        }
        (_, Some(_)) => bail!("{reference} is not an index: leave out --platform"),
        // A manifest that is not an image can also have referrers.
        (_, None) => Ok(fetched.digest),
    }
}

/// Report of `referrers --json`.
#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ReferrersReport {
    /// Digest of the manifest.
    subject: String,
    /// Artifacts that refer to the manifest.
    referrers: Vec<ReferrerReport>,
}

#[derive(Serialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub(crate) struct ReferrerReport {
    /// Digest of the artifact's manifest.
    digest: String,
    /// Media type of the artifact's manifest.
    media_type: String,
    /// Type of the artifact, such as a signature or an SBOM.
    artifact_type: String,
    /// Size of the artifact's manifest.
    size: report::Bytes,
    /// Annotations from the maker of the artifact.
    annotations: BTreeMap<String, String>,
}

impl ReferrerReport {
    fn from_referrer(one: &Referrer) -> Self {
        let of = &one.descriptor;
        Self {
            digest: of.digest.to_string(),
            media_type: of.media_type.clone(),
            artifact_type: one.artifact_type.clone(),
            size: report::Bytes(of.size),
            annotations: of.annotations.clone(),
        }
    }

    /// Returns the row of the table for people.
    fn row(&self) -> Vec<String> {
        let notes = self.annotations.iter().map(|(name, value)| plain(&format!("{name}={value}")));
        vec![
            self.digest.clone(),
            plain(&self.artifact_type),
            report::size(self.size.0),
            notes.collect::<Vec<_>>().join(" "),
        ]
    }
}

/// Escapes untrusted text from the registry for a terminal.
fn plain(text: &str) -> String {
    report::plain(&text.escape_debug().to_string()).into_owned()
}
