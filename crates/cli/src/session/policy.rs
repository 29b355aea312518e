//! The policies in force, asked before an image is used.

use std::path::PathBuf;

use anyhow::bail;
use oci::policy::{Default, Policies};
use store::{Permitted, Resolved, Store, UsePolicy};
use transfer::evidence::{UseError, check_use};

use crate::session::context::Context;

/// The administrator's: nothing that a user says takes its place.
const SYSTEM: &str = "/etc/quire/policy.toml";

/// The policies in force: the administrator's, and one more, which can only refuse what the first accepts.
pub(crate) fn policies(context: &Context) -> anyhow::Result<Policies> {
    let named = context.policy();
    let mut files = vec![PathBuf::from(SYSTEM)];
    files.extend(named.map_or_else(|| user_file(context), |it| Some(it.to_owned())));
    let policies = Policies::load(&files)?;
    // By default none has to be there. One that is named and not there is a mistake, or is being written anew: until it is
    // there again, nothing may be used.
    if let Some(named) = named.filter(|it| !policies.all().iter().any(|policy| policy.file == **it))
    {
        bail!("there is no policy {}", named.display());
    }
    Ok(policies)
}

/// The policies in force, as the store asks them.
struct InForce(Policies);

impl UsePolicy for InForce {
    type Refusal = UseError;

    fn check(&self, store: &Store, found: &Resolved) -> Result<(), UseError> {
        for key in check_use(&self.0, store, found)?.signed_by {
            tracing::info!(image = %found.image, key = %key.display(), "signed");
        }
        Ok(())
    }
}

/// Refuses an image that a policy does not accept, by what is known of it in the store.
pub(crate) fn permit(
    context: &Context,
    store: &Store,
    found: Resolved,
) -> anyhow::Result<Permitted> {
    Ok(store.permit(&InForce(policies(context)?), found)?)
}

/// What is in force, in a line for people.
pub(crate) fn describe(context: &Context) -> Result<String, String> {
    let policies = match policies(context) {
        Ok(policies) => policies,
        Err(error) => return Err(format!("nothing is accepted: {error:#}")),
    };
    let one = |it: &oci::policy::Policy| {
        let default = match it.default {
            Default::Any => "accepted",
            Default::None => "refused",
        };
        let (file, count) = (it.file.display(), it.rules.len());
        format!("{file} ({count} rules, all others are {default})")
    };
    let all: Vec<_> = policies.all().iter().map(one).collect();
    if all.is_empty() {
        return Ok(format!("none: any image is accepted, signed or not ({SYSTEM} is not there)"));
    }
    Ok(all.join(" and "))
}

/// Source: XDG Base Directory Specification 0.8: relative values are to be ignored.
fn user_file(context: &Context) -> Option<PathBuf> {
    let absolute = |it: std::ffi::OsString| Some(PathBuf::from(it)).filter(|it| it.is_absolute());
    let config = std::env::var_os("XDG_CONFIG_HOME").and_then(absolute);
    // In a namespace the variables are those of before.
    let home = || Some(crate::session::context::home(context.who())?.join(".config"));
    Some(config.or_else(home)?.join("quire/policy.toml"))
}
