//! How a user without root gets an image into a user namespace: by the mount service, FUSE, or a tree.

use crate::args::Trust;
#[cfg(feature = "serve")]
use crate::args::ViaWord;
use container::root::Via;
use kernel::process::Who;

/// The services through which this user gets images into a user namespace.
#[derive(Debug)]
pub(crate) struct Ways {
    #[cfg(feature = "serve")]
    server: serve::fuse::FuseServer,
    #[cfg(feature = "serve")]
    lender: serve::mounts::MountLender,
}

impl Ways {
    #[cfg_attr(not(feature = "serve"), expect(unused_variables, reason = "only servers use it"))]
    pub(crate) fn new(who: Who, trust: &Trust) -> Self {
        Self {
            #[cfg(feature = "serve")]
            server: serve::fuse::FuseServer::new(who),
            #[cfg(feature = "serve")]
            lender: serve::mounts::MountLender::at(&trust.mount_service),
        }
    }

    /// Returns the way that the options select.
    #[cfg_attr(
        not(feature = "serve"),
        expect(unused_variables, reason = "at least one way exists")
    )]
    pub(crate) fn via(&self, trust: &Trust) -> Via<'_> {
        #[cfg(feature = "serve")]
        return match trust.via {
            ViaWord::Auto => Via::Auto {
                lender: Some(&self.lender),
                names: Some(&self.server),
                server: Some(&self.server),
            },
            ViaWord::FuseObjects => Via::FuseObjects(&self.server),
            ViaWord::Service => Via::Service(&self.lender),
            ViaWord::Tree => Via::Tree,
            ViaWord::Fuse => Via::Fuse(&self.server),
        };
        #[cfg(not(feature = "serve"))]
        Via::Tree
    }
}
