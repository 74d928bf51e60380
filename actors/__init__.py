"""This deployment's actors: `dramatiq asyncworker.actors` imports every module here, in sorted order."""
