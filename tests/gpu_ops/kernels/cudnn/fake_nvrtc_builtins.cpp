// Library that accompanies the run-time compiler; the tests need only that it can be loaded.
extern "C" int nvrtc_builtins_of_a_fake() { return 0; }
