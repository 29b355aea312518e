//! Fetches signatures from a registry.

use std::error::Error;
use std::io::Read as _;

use super::SignatureSource;
use crate::Digest;
use crate::manifest::Descriptor;
use crate::registry::{Fetched, Registry, RegistryError};

fn found(fetched: Result<Fetched, RegistryError>) -> Result<Option<Vec<u8>>, Unanswered> {
    match fetched {
        Ok(fetched) => Ok(Some(fetched.bytes)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(Unanswered(Box::new(error))),
    }
}

/// A request to the registry failed.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct Unanswered(Box<dyn Error + Send + Sync>);

impl SignatureSource for Registry {
    type Error = Unanswered;

    fn manifest_by_tag(&self, tag: &str) -> Result<Option<Vec<u8>>, Unanswered> {
        found(self.manifest(tag))
    }

    fn referrers(&self, digest: &Digest, kind: &str) -> Result<Vec<Descriptor>, Unanswered> {
        let listed = Self::referrers(self, digest, Some(kind));
        let listed = listed.map_err(|error| Unanswered(Box::new(error)))?;
        Ok(listed.into_iter().map(|it| it.descriptor).collect())
    }

    fn manifest(&self, digest: &Digest) -> Result<Option<Vec<u8>>, Unanswered> {
        found(Self::manifest(self, &digest.to_string()))
    }

    fn blob(&self, digest: &Digest, limit: u64) -> Result<Vec<u8>, Unanswered> {
        let mut bytes = Vec::new();
        let blob = Self::blob(self, digest, None, 0).as_document();
        let read = blob.take(limit + 1).read_to_end(&mut bytes);
        read.map_err(|error| Unanswered(Box::new(error)))?;
        if bytes.len() as u64 > limit {
            return Err(Unanswered(format!("blob {digest} has more than {limit} bytes").into()));
        }
        Ok(bytes)
    }
}
